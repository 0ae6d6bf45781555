"""Addresses of engines in a Prometheus server, such as prometheus://HOST:9090/?job=vllm&instance=gpu1:8000."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from kvscope_telemetry.collectors.server_address import ServerAddress, checked_key, is_yes
from kvscope_telemetry.errors import BadInput

SCHEME: Final = "prometheus"
MAX_PAST_S: Final = 24 * 3600
INSTANCE: Final = "instance"
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_PAST: Final = re.compile(r"(\d{1,6})([smh]?)")
_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "h": 3600}
_ACCEPTED: Final = (
    f"{SCHEME}://HOST:PORT?job=JOB, with labels such as instance=HOST:PORT or namespace=NAME, and past=1h, rank=N, "
    "tls=1, ca=FILE"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusAddress(ServerAddress):
    """A Prometheus server, and the labels that select one or several engines in it. `str()` returns text that `parse`
    accepts, without the API key.
    """

    labels: tuple[tuple[str, str], ...] = ()
    """Label names and values that the engine's metrics must have, in the order of the address."""
    rank: int | None = None
    """Data-parallel rank; None for the lowest."""
    past_s: int | None = None
    """Seconds of the past to read; None to leave it to the program."""

    @classmethod
    def parse(
        cls, text: str, *, api_key: str = "", tls: bool = False, ca: str = "", api_key_over_http: bool = False
    ) -> PrometheusAddress:
        """Parse an address. Keyword arguments override the options in the text. An API key NAME:PASSWORD is sent as
        basic authentication, any other as a bearer token.

        Raises:
            BadInput: for invalid text or options, and for a key that must not be sent.
        """
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise _not_accepted(text) from None
        is_printable = text.isprintable() and not any(letter.isspace() for letter in text)
        if parts.scheme != SCHEME or not parts.hostname or not port or parts.fragment or not is_printable:
            raise _not_accepted(text)
        if "@" in parts.netloc:
            raise BadInput("an address with a user name before its host is not accepted: use --api-key-file")
        options = _options(text, parts.query)
        address = cls(
            host=parts.hostname,
            port=port,
            path=parts.path.rstrip("/"),
            tls=tls or bool(ca) or is_yes("tls", options.pop("tls", "")) or "ca" in options,
            ca=ca or options.pop("ca", ""),
            api_key_over_http=api_key_over_http or is_yes("api_key_over_http", options.pop("api_key_over_http", "")),
            api_key=checked_key(api_key),
            rank=_rank(options.pop("rank", "")),
            past_s=_past(options.pop("past", "")),
            labels=tuple(options.items()),
        )
        address.check_key_is_protected()
        return address

    def __str__(self) -> str:
        options = [
            *self.labels,
            *([("rank", str(self.rank))] if self.rank is not None else []),
            *([("past", f"{self.past_s}s")] if self.past_s is not None else []),
            *([("ca", self.ca)] if self.ca else [("tls", "1")] if self.tls else []),
            *([("api_key_over_http", "1")] if self.api_key_over_http else []),
        ]
        query = urlencode(options, safe=":/*[]@")
        return f"{SCHEME}://{self.authority}{self.path}" + (f"/?{query}" if query else "")

    @property
    def name(self) -> str:
        """Address for display, without the options that select no engine."""
        return str(replace(self, past_s=None, tls=False, ca="", api_key_over_http=False))

    @property
    def authorization(self) -> dict[str, str]:
        headers = self._bearer
        if headers and ":" in self.api_key:
            return {"Authorization": f"Basic {base64.b64encode(self.api_key.encode()).decode()}"}
        return headers

    @property
    def matchers(self) -> str:
        """Label matchers in PromQL, such as `job="vllm",instance="gpu1:8000"`; empty if there are none."""
        return ",".join(f"{name}={_quoted(value)}" for name, value in self.labels)

    def of_engine(self, labels: dict[str, str]) -> PrometheusAddress:
        """Return the address with `labels` that select one engine, instead of those with the same names."""
        return replace(self, labels=tuple({**dict(self.labels), **labels}.items()))


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _options(text: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "api_key":
            raise BadInput("api_key in an address is not accepted, because addresses are displayed: use --api-key-file")
        if name in options or not _LABEL.fullmatch(name) or name.startswith("__"):
            raise BadInput(f"option {name!r} of address {text!r} is not accepted: once each, {_ACCEPTED}")
        options[name] = value
    return options


def _rank(value: str) -> int | None:
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 4):
        raise BadInput(f"rank={value!r} is not accepted: the number of a data-parallel rank")
    return int(value)


def _past(value: str) -> int | None:
    if not value:
        return None
    match = _PAST.fullmatch(value)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else -1
    if not 0 <= seconds <= MAX_PAST_S:
        raise BadInput(f"past={value!r} is not accepted: 0 to {MAX_PAST_S // 3600}h, such as 90s, 30m or 6h")
    return seconds


def _not_accepted(text: str) -> BadInput:
    return BadInput(f"address {text!r} is not accepted: {_ACCEPTED}")
