"""What a person types of an engine to attach to, as its address. Knows no Qt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_telemetry.addresses import Address
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.external import engines
from kvscope_telemetry.sockets.connections import Connection

OWN: Final = "kvscope"


@dataclass(frozen=True, slots=True)
class Typed:
    """The fields of the sheet, without spaces around them."""

    kind: str
    """One of `kinds()`."""
    where: str
    """An address, or HOST:PORT of another engine's server; http:// and https:// are understood."""
    key_file: str = ""
    api_key: str = ""
    tls: bool = False
    ca_file: str = ""
    kv_events: str = ""

    @property
    def address(self) -> Address:
        """Raises BadInput where nothing was typed, or what was typed says another kind."""
        if not self.where:
            raise BadInput("an engine is needed: " + ("its endpoint" if self.kind == OWN else "HOST:PORT"))
        if self.kind == OWN:
            return Address(self.where, Path(self.key_file) if self.key_file else None)
        scheme, separator, rest = self.where.partition("://")
        if separator and scheme not in ("http", "https", self.kind):
            raise BadInput(
                f"address {self.where!r} is not accepted for {engines.engine_name(self.kind)}: HOST:PORT of its server"
            )
        host = rest if separator else self.where
        return Address(
            f"{self.kind}://{host.rstrip('/') if '?' not in host else host}",
            kv_events=self.kv_events,
            api_key=self.api_key,
            tls=self.tls or scheme == "https",
            ca_file=Path(self.ca_file) if self.ca_file else None,
        )

    def connection(self, address: Address, label: str) -> Connection:
        """What is remembered of it: no API key."""
        if self.kind == OWN:
            return Connection(address.text, self.key_file, label)
        return Connection(address.text, "", label, self.kv_events, address.tls, self.ca_file)


def kinds() -> tuple[str, ...]:
    """Of engines, as they stand in the sheet: kvscope's own, then others by the scheme of their addresses."""
    return (OWN, *[engine.scheme for engine in engines.ENGINES])


def kind_of(text: str) -> str:
    """What kind of engine an address is of."""
    scheme = text.partition("://")[0]
    return scheme if engines.find_engine(scheme) is not None else OWN


def shown_of(text: str) -> str:
    """As the sheet shows it: of another engine without the scheme, which its kind says."""
    return text.partition("://")[2] if kind_of(text) != OWN else text
