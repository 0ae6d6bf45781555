"""Limits on what one client, and all clients together, may occupy in one engine, and the counts against these limits.

Commands beyond the limits are refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

MIB = 1 << 20
NEVER: Final = "this can never be served: "
"""Prefix of refusals that waiting does not cure."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Maximum number of something, and maximum bytes in total."""

    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits of what the engine's process holds for its clients. Bytes are measured by `command_bytes`."""

    client_commands: Bound = Bound(4_096, 32 * MIB)
    """Queued commands of one client."""
    all_commands: Bound = Bound(16_384, 128 * MIB)
    client_prompts: Bound = Bound(2_048, 64 * MIB)
    """Submissions of one client whose prompts are being tokenized."""
    all_prompts: Bound = Bound(8_192, 256 * MIB)
    client_requests: Bound = Bound(8_192, 256 * MIB)
    """Waiting and running completions of one client, with their prompts' tokens."""
    all_requests: Bound = Bound(32_768, 1024 * MIB)
    client_snapshots: int = 64
    """Maximum number of snapshots that one client may wait for."""


class Allowance:
    """Counts one kind of resource by client and refuses what would exceed a bound.

    Not thread-safe: its owner locks it.

    `what` completes "{count} {what} already", for example "commands wait" or "requests are open".
    """

    def __init__(self, what: str, client_bound: Bound, total_bound: Bound) -> None:
        self._what = what
        self._client_bound = client_bound
        self._total_bound = total_bound
        self._held: dict[Hashable, tuple[int, int]] = {}
        self._total = (0, 0)

    def take(self, client: Hashable, num_bytes: int, count: int = 1) -> str:
        """Count a resource. Returns the reason, and counts nothing, if that exceeds a bound; else an empty string."""
        reason = self.refusal(client, num_bytes, count)
        if not reason:
            self._add(client, self.held(client), count, num_bytes)
        return reason

    def refusal(self, client: Hashable, num_bytes: int, count: int = 1) -> str:
        """Return the reason why `take` would refuse; an empty string if it would not."""
        reason = self._over(self.held(client), self._client_bound, count, num_bytes, "a client")
        return reason or self._over(self._total, self._total_bound, count, num_bytes, "all clients")

    def give(self, client: Hashable, num_bytes: int, count: int = 1) -> None:
        self._add(client, self._held[client], -count, -num_bytes)

    def move(self, before: Hashable, client: Hashable) -> None:
        """Move the counts of `before` to `client`, even if their sum exceeds a bound."""
        count, num_bytes = self._held.pop(before, (0, 0))
        self._total = (self._total[0] - count, self._total[1] - num_bytes)
        self._add(client, self.held(client), count, num_bytes)

    def held(self, client: Hashable) -> tuple[int, int]:
        """Return the count and bytes of one client."""
        return self._held.get(client, (0, 0))

    @property
    def total(self) -> tuple[int, int]:
        """Count and bytes of all clients."""
        return self._total

    def _add(self, client: Hashable, held: tuple[int, int], count: int, num_bytes: int) -> None:
        now = (held[0] + count, held[1] + num_bytes)
        assert min(now) >= 0, f"{client!r} gives back more than it took"
        self._total = (self._total[0] + count, self._total[1] + num_bytes)
        if now == (0, 0):
            self._held.pop(client, None)
        else:
            self._held[client] = now

    def _over(self, held: tuple[int, int], bound: Bound, count: int, num_bytes: int, whose: str) -> str:
        if count > bound.count or num_bytes > bound.num_bytes:
            return (
                f"{NEVER}{count} with {num_bytes} bytes at once is beyond the limit of {bound.count} with"
                f" {bound.num_bytes} bytes for {whose}"
            )
        if held[0] + count > bound.count:
            return f"{held[0]} {self._what} already, and {count} more is beyond the limit of {bound.count} for {whose}"
        if held[1] + num_bytes > bound.num_bytes:
            return (
                f"{held[0]} {self._what} already with {held[1]} bytes,"
                f" and {num_bytes} more is beyond the limit of {bound.num_bytes} for {whose}"
            )
        return ""


def behind(reason: str) -> str:
    """Return the text of a refusal by an allowance: temporary ("the engine is behind") or permanent."""
    return reason if reason.startswith(NEVER) else f"the engine is behind: {reason}"
