"""Converts the input in the attach dialog to an engine address. Imports no Qt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_telemetry.addresses import Address
from kvscope_telemetry.collectors import external_engines
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.transport.connections import Connection

OWN_ENGINE: Final = "kvscope"


@dataclass(frozen=True, slots=True)
class TypedAddress:
    kind: str
    """Kind of engine, one of `engine_kinds()`."""
    address_text: str
    """Telemetry endpoint of kvscope's own engine, or HOST:PORT of another engine's server, optionally with http:// or
    https://.
    """
    key_file: str = ""
    api_key: str = ""
    tls: bool = False
    ca_file: str = ""
    kv_events: str = ""

    @property
    def address(self) -> Address:
        """The engine's address. Raises BadInput if nothing was entered or the scheme contradicts `kind`."""
        if not self.address_text:
            raise BadInput(
                "enter the address of an engine: " + ("its endpoint" if self.kind == OWN_ENGINE else "HOST:PORT")
            )
        if self.kind == OWN_ENGINE:
            return Address(self.address_text, Path(self.key_file) if self.key_file else None)
        scheme, separator, host_port = self.address_text.partition("://")
        if separator and scheme not in ("http", "https", self.kind):
            name = external_engines.engine_name(self.kind)
            raise BadInput(f"address {self.address_text!r} is not accepted for {name}: HOST:PORT of its server")
        host = host_port if separator else self.address_text
        return Address(
            f"{self.kind}://{host.rstrip('/') if '?' not in host else host}",
            kv_events=self.kv_events,
            api_key=self.api_key,
            tls=self.tls or scheme == "https",
            ca_file=Path(self.ca_file) if self.ca_file else None,
        )

    def connection(self, address: Address, label: str) -> Connection:
        """Return the connection to save, without the API key."""
        if self.kind == OWN_ENGINE:
            return Connection(address.text, self.key_file, label)
        return Connection(address.text, "", label, self.kv_events, address.tls, self.ca_file)


def engine_kinds() -> tuple[str, ...]:
    """Return the kinds of engines in the dialog's order: kvscope's own, then the schemes of other engines."""
    return (OWN_ENGINE, *[engine.scheme for engine in external_engines.ENGINES])


def kind_of(text: str) -> str:
    scheme = text.partition("://")[0]
    return scheme if external_engines.find_engine(scheme) is not None else OWN_ENGINE


def field_text_of(text: str) -> str:
    """Return the text of an address in the dialog: without the scheme if the kind of engine implies it."""
    return text.partition("://")[2] if kind_of(text) != OWN_ENGINE else text
