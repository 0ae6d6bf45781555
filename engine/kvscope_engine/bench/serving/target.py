"""The server that is measured: where it is, what its model is called, and what every request to it says."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import h11
import msgspec

from kvscope_engine.bench.serving.samples import Sample
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.foreign.address import ForeignAddress
from kvscope_telemetry.foreign.http.line import tls_of
from kvscope_telemetry.foreign.http.reasons import why_broken
from kvscope_telemetry.foreign.http_get import NoAnswer
from kvscope_telemetry.foreign.prompting.question import CHAT, COMPLETIONS
from kvscope_telemetry.foreign.prompting.served_model import ServedModel

ENDPOINTS: Final = (COMPLETIONS, CHAT)
_PORTS: Final = {"http": 80, "https": 443}
_CONNECT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Asking:
    """What every request says beside its prompt."""

    endpoint: str = COMPLETIONS
    ignore_eos: bool = True
    knows_ignore_eos: bool = True
    """Else `min_tokens` says the same."""
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that only this server knows."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server that was reached."""

    address: ForeignAddress
    peer: str
    """The host, as the number that was reached: no request waits for a name."""
    tls: ssl.SSLContext | None
    model: str
    asking: Asking

    @property
    def url(self) -> str:
        """For a person."""
        return self.address.url(self.asking.endpoint)

    def body(self, sample: Sample) -> bytes:
        """Of one request."""
        asking = self.asking
        is_chat = asking.endpoint == CHAT
        fields: dict[str, Any] = {"model": self.model, "max_tokens": sample.max_tokens}
        fields |= {"messages": [{"role": "user", "content": sample.prompt}]} if is_chat else {"prompt": sample.prompt}
        fields |= {"temperature": asking.temperature, "stream": True, "stream_options": {"include_usage": True}}
        if asking.ignore_eos:
            fields |= {"ignore_eos": True} if asking.knows_ignore_eos else {"min_tokens": sample.max_tokens}
        return msgspec.json.encode(fields | dict(asking.extra))

    def head(self, num_bytes: int) -> h11.Request:
        """Of one request whose body has as many bytes."""
        headers = [
            ("Host", self.address.authority),
            ("Accept", "text/event-stream"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(num_bytes)),
            ("Connection", "close"),
        ]
        if self.address.api_key:
            headers.append(("Authorization", f"Bearer {self.address.api_key}"))
        return h11.Request(method="POST", target=self.address.path + self.asking.endpoint, headers=headers)


def address_of(url: str, *, api_key: str = "", ca: str = "") -> ForeignAddress:
    """Of `http://HOST:PORT`, with what a gateway has before its paths; `/v1` at its end is of the API. BadInput."""
    refusal = BadInput(f"--base-url {url!r:.120} is not accepted: http://HOST:PORT or https://HOST:PORT")
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError):
        raise refusal from None
    is_plain = url.isprintable() and " " not in url and not (parts.query or parts.fragment)
    if not parts.hostname or "@" in parts.netloc or not is_plain:
        raise refusal
    if ca and parts.scheme == "http":
        raise BadInput("--tls-ca is for an https URL")
    path = parts.path.rstrip("/").removesuffix("/v1")
    is_tls = parts.scheme == "https"
    return ForeignAddress("vllm", parts.hostname, port, path=path, tls=is_tls, ca=ca, api_key=api_key)


def reached(address: ForeignAddress, model: str, asking: Asking) -> Target:
    """The server there; its first model where `model` is empty. Raises NoAnswer, and BadInput for bad certificates."""
    tls = tls_of(address)
    try:
        with socket.create_connection((address.host, address.port), timeout=_CONNECT_S) as connection:
            peer: str = connection.getpeername()[0]
    except OSError as error:
        raise NoAnswer(why_broken(address.url(""), error)) from None
    return Target(address, peer, tls, model or ServedModel(address).get().name, asking)
