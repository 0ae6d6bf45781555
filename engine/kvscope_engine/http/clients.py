"""Identifies clients and bounds what each may hold of this process: requests, bodies and choices. Knows no endpoint.

A client is known by its API key where the server accepts several, and else by its address: a key that everybody has
tells nobody apart, and one that is not checked could be made up anew for each request. The engine is told a hash.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvscope_engine.http.api import HttpLimits
from kvscope_engine.http.shapes.errors import ApiError

FEW_REQUESTS: Final = 8
"""Who has fewer gets a place when others have all of them, as long as there are some to spare."""
SPARE: Final = 8
"""One place in so many, beyond the limit."""


def client_name(key: str, address: str, forwarded: Sequence[str] = ()) -> str:
    """A short name for whoever shows `key`, or calls from `address` where that is empty.

    `forwarded` are `X-Forwarded-For` headers that are to be believed: their last address is the one that the nearest
    proxy saw. A network of IPv6 (/64) is one client: its addresses are made up by whoever has it.
    """
    if key:
        return _hashed(f"key {key}")
    last = forwarded[-1].rpartition(",")[2].strip() if forwarded else ""
    return _hashed(f"address {_network(last) or _network(address) or address}")


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0].strip("[]"))
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
        return str(mapped or ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return str(found)


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=9).hexdigest()


@dataclass(slots=True)
class Holding:
    """Of one client, or of all."""

    requests: int = 0
    body_bytes: int = 0
    choices: int = 0


class Clients:
    """What is held, by client and together. Belongs to the event loop."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.all = Holding()
        self._by_name: dict[str, Holding] = {}

    def slot(self, name: str) -> Slot:
        """A place for one request of a client."""
        return Slot(self, name)

    def held(self, name: str) -> Holding:
        """By one client; not to be changed."""
        return self._by_name.get(name, Holding())

    def add(self, name: str, requests: int = 0, body_bytes: int = 0, choices: int = 0) -> None:
        """Count in, or out where it is negative."""
        for holding in (self.all, self._by_name.setdefault(name, Holding())):
            holding.requests += requests
            holding.body_bytes += body_bytes
            holding.choices += choices
        if self._by_name[name] == Holding():
            del self._by_name[name]


class Slot:
    """One request's place: what it holds until it is over."""

    def __init__(self, clients: Clients, name: str) -> None:
        self.client = name
        self._clients = clients
        self._limits = clients.limits
        self._mine = Holding()

    @property
    def body_bytes(self) -> int:
        """Of its body, as far as it came and is needed."""
        return self._mine.body_bytes

    def enter(self) -> None:
        """Take a place among those being answered. Raises ApiError with 429 when there is none."""
        places, taken = self._limits.max_requests, self._clients.all.requests
        is_few = self._clients.held(self.client).requests < FEW_REQUESTS
        if taken >= places + (places // SPARE if is_few else 0):
            raise _busy(f"{taken} requests are in progress already: try again later")
        self._add(requests=1)

    def add(self, num_bytes: int) -> None:
        """More of its body came. Raises ApiError when it is, or all bodies are, too large."""
        self._add(body_bytes=num_bytes)
        limits = self._limits
        if self._mine.body_bytes > limits.max_body_bytes:
            raise too_large(limits)
        if self._clients.all.body_bytes > limits.max_bodies_bytes:
            raise _busy("too many bodies are being read at a time")
        if self._clients.held(self.client).body_bytes > max(limits.max_bodies_bytes // 2, limits.max_body_bytes):
            raise _busy("too many concurrent request bodies from this client")

    def give_body(self) -> None:
        """Nothing of its body is needed any more: it is tokens."""
        self._add(body_bytes=-self._mine.body_bytes)

    def choose(self, count: int, param: str = "n") -> None:
        """It asks for so many choices. Raises ApiError: 400 for more than there may ever be, 429 for more than now."""
        most = self._limits.max_choices
        if count > most:
            message = f"{count} choices (n for each prompt) are not accepted: at most {most}"
            raise ApiError(400, message, param=param)
        held = self._clients.held(self.client).choices
        if held + count > most:
            raise _busy(f"{held} choices of this client are under way already, and {count} more is beyond {most}")
        self._add(choices=count)

    def leave(self) -> None:
        """It is over."""
        self._add(-self._mine.requests, -self._mine.body_bytes, -self._mine.choices)

    def _add(self, requests: int = 0, body_bytes: int = 0, choices: int = 0) -> None:
        self._mine.requests += requests
        self._mine.body_bytes += body_bytes
        self._mine.choices += choices
        self._clients.add(self.client, requests, body_bytes, choices)


def too_large(limits: HttpLimits) -> ApiError:
    """For a body beyond the limit."""
    return ApiError(413, f"a body of more than {limits.max_body_bytes} bytes is not accepted")


def _busy(message: str) -> ApiError:
    return ApiError(429, message, code="server_busy")
