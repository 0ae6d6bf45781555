"""Who holds the engine's steps. A pause lasts as long as whoever asked for it.

Owns the holders and their leases. Knows neither sockets nor the engine. `renew` is called on the I/O thread,
everything else on the engine's; `names` and `held_s` may be read from any.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class _Hold:
    name: str
    lease_ns: int
    """0: as long as the connection."""
    heard_ns: int


class Pauses:
    """The engine stands still while there is any holder."""

    def __init__(self) -> None:
        self.names = ""
        """Of all holders, for people; empty when nobody holds."""
        self._holds: dict[bytes, _Hold] = {}
        self._since_ns = 0
        """When the first of those who hold began."""

    @property
    def any(self) -> bool:
        """Whether somebody holds the steps."""
        return bool(self._holds)

    @property
    def held_s(self) -> float:
        """How long the engine has stood still; from any thread."""
        since_ns = self._since_ns
        return (time.monotonic_ns() - since_ns) / 1e9 if since_ns else 0.0

    @property
    def holders(self) -> list[bytes]:
        """The clients that do."""
        return list(self._holds)

    def hold(self, client: bytes, name: str, lease_s: float) -> None:
        """Stop from now on, for this client."""
        self._holds[client] = _Hold(name, int(lease_s * 1e9), time.monotonic_ns())
        self._tell()

    def renew(self, client: bytes) -> None:
        """Something was heard of a client."""
        hold = self._holds.get(client)
        if hold is not None:
            hold.heard_ns = time.monotonic_ns()

    def release(self, client: bytes) -> None:
        """A client is gone; does nothing for one that holds nothing."""
        self._holds.pop(client, None)
        self._tell()

    def release_all(self) -> None:
        """Somebody lets the engine go on."""
        self._holds.clear()
        self._tell()

    def expire(self) -> None:
        """End the pauses of those that were not heard of for their lease."""
        now_ns = time.monotonic_ns()
        for client, hold in list(self._holds.items()):
            if hold.lease_ns and now_ns - hold.heard_ns > hold.lease_ns:
                del self._holds[client]
        self._tell()

    def _tell(self) -> None:
        self._since_ns = (self._since_ns or time.monotonic_ns()) if self._holds else 0
        self.names = ", ".join(dict.fromkeys(hold.name for hold in self._holds.values()))
