"""Identifies clients, and limits the requests, bodies and choices that each may occupy in this process.

A client is identified by its API key if the server accepts several, otherwise by its address: a shared key
distinguishes no clients, and an unchecked key could be invented for each request. The engine receives only a hash.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvscope_engine.http.api_state import HttpLimits
from kvscope_engine.http.schemas.api_errors import ApiError

FEW_REQUESTS: Final = 8
"""Number of requests below which a client may use the spare slots when all regular slots are occupied."""
SPARE_SLOT_DIVISOR: Final = 8
"""The number of spare slots is `max_requests` divided by this."""


def client_name(key: str, address: str, forwarded: Sequence[str] = ()) -> str:
    """Return a short hash that identifies the holder of `key`, or the client at `address` if `key` is empty.

    `forwarded` are trusted `X-Forwarded-For` headers; their last address is the one seen by the nearest proxy. An IPv6
    network (/64) is one client, because its owner can choose addresses in it freely.
    """
    if key:
        return _hashed(f"key {key}")
    last = forwarded[-1].rpartition(",")[2].strip() if forwarded else ""
    return _hashed(f"address {_network(last) or _network(address) or address}")


def _network(address: str) -> str:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0].strip("[]"))
    except ValueError:
        return ""
    if isinstance(ip, ipaddress.IPv6Address):
        mapped = ip.ipv4_mapped
        return str(mapped or ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
    return str(ip)


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=9).hexdigest()


@dataclass(slots=True)
class ClientUsage:
    requests: int = 0
    body_bytes: int = 0
    choices: int = 0


class ClientLimiter:
    """Counts requests, body bytes and choices by client and in total. Used only on the event loop."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.all = ClientUsage()
        self._by_name: dict[str, ClientUsage] = {}

    def slot(self, name: str) -> RequestSlot:
        """Create a slot for a request of client `name`. The request counts once `RequestSlot.enter` is called."""
        return RequestSlot(self, name)

    def usage_of(self, name: str) -> ClientUsage:
        """Return the usage of one client. The result must not be modified."""
        return self._by_name.get(name, ClientUsage())

    def count(self, name: str, requests: int = 0, body_bytes: int = 0, choices: int = 0) -> None:
        for usage in (self.all, self._by_name.setdefault(name, ClientUsage())):
            usage.requests += requests
            usage.body_bytes += body_bytes
            usage.choices += choices
        if self._by_name[name] == ClientUsage():
            del self._by_name[name]


class RequestSlot:
    def __init__(self, clients: ClientLimiter, name: str) -> None:
        self.client = name
        self._clients = clients
        self._limits = clients.limits
        self._usage = ClientUsage()

    @property
    def body_bytes(self) -> int:
        """Bytes of the body received so far; 0 after `release_body`."""
        return self._usage.body_bytes

    def enter(self) -> None:
        """Count the request as in progress. Raises ApiError with 429 if a limit is reached."""
        max_requests, num_requests = self._limits.max_requests, self._clients.all.requests
        is_few = self._clients.usage_of(self.client).requests < FEW_REQUESTS
        if num_requests >= max_requests + (max_requests // SPARE_SLOT_DIVISOR if is_few else 0):
            raise _busy(f"{num_requests} requests are in progress already: try again later")
        self._count(requests=1)

    def count_body_bytes(self, num_bytes: int) -> None:
        """Count received bytes of the body. Raises ApiError if this body (413) or all bodies together (429) are too
        large.
        """
        self._count(body_bytes=num_bytes)
        limits = self._limits
        if self._usage.body_bytes > limits.max_body_bytes:
            raise too_large(limits)
        if self._clients.all.body_bytes > limits.max_bodies_bytes:
            raise _busy("too many bodies are being read at a time")
        if self._clients.usage_of(self.client).body_bytes > max(limits.max_bodies_bytes // 2, limits.max_body_bytes):
            raise _busy("too many concurrent request bodies from this client")

    def release_body(self) -> None:
        self._count(body_bytes=-self._usage.body_bytes)

    def count_choices(self, count: int, param: str = "n") -> None:
        """Count the request's choices. Raises ApiError: 400 if it has more than are ever allowed, 429 if it has more
        than are currently available.
        """
        max_choices = self._limits.max_choices
        if count > max_choices:
            message = f"{count} choices (n for each prompt) are not accepted: at most {max_choices}"
            raise ApiError(400, message, param=param)
        occupied = self._clients.usage_of(self.client).choices
        if occupied + count > max_choices:
            raise _busy(
                f"{occupied} choices of this client are under way already, and {count} more is beyond {max_choices}"
            )
        self._count(choices=count)

    def leave(self) -> None:
        self._count(-self._usage.requests, -self._usage.body_bytes, -self._usage.choices)

    def _count(self, requests: int = 0, body_bytes: int = 0, choices: int = 0) -> None:
        self._usage.requests += requests
        self._usage.body_bytes += body_bytes
        self._usage.choices += choices
        self._clients.count(self.client, requests, body_bytes, choices)


def too_large(limits: HttpLimits) -> ApiError:
    return ApiError(413, f"a body of more than {limits.max_body_bytes} bytes is not accepted")


def _busy(message: str) -> ApiError:
    return ApiError(429, message, code="server_busy")
