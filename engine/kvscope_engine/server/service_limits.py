"""Limits on what one client, and all clients together, may occupy in one engine, and the counts against these
limits.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

MIB = 1 << 20
PERMANENT_REFUSAL: Final = "this can never be served: "
"""Prefix of the refusal text of requests that can never be accepted, even if the client waits."""


@dataclass(frozen=True, slots=True)
class Bound:
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits on the commands, prompts and requests that the engine's process stores for its clients. Bytes are
    measured by `command_bytes`.
    """

    client_commands: Bound = Bound(4_096, 32 * MIB)
    all_commands: Bound = Bound(16_384, 128 * MIB)
    client_prompts: Bound = Bound(2_048, 64 * MIB)
    all_prompts: Bound = Bound(8_192, 256 * MIB)
    client_requests: Bound = Bound(8_192, 256 * MIB)
    """Waiting and running completions of one client. Their bytes include the tokens of the prompts."""
    all_requests: Bound = Bound(32_768, 1024 * MIB)
    client_snapshots: int = 64
    """Maximum number of snapshots that one client may wait for."""


class Allowance:
    """Counts one kind of resource by client, and refuses whatever would exceed a bound.

    Not thread-safe: the owner locks it.

    `resource_text` completes "{count} {resource_text} already", for example "commands wait" or "requests are open".
    """

    def __init__(self, resource_text: str, client_bound: Bound, total_bound: Bound) -> None:
        self._resource_text = resource_text
        self._client_bound = client_bound
        self._total_bound = total_bound
        self._usage: dict[Hashable, tuple[int, int]] = {}
        self._total = (0, 0)

    def acquire(self, client: Hashable, num_bytes: int, count: int = 1) -> str:
        """Count `count` items of `num_bytes` bytes in total for `client`.

        Returns "", or the reason if a bound would be exceeded; then nothing is counted.
        """
        reason = self.refusal(client, num_bytes, count)
        if not reason:
            self._change_usage(client, self.usage(client), count, num_bytes)
        return reason

    def refusal(self, client: Hashable, num_bytes: int, count: int = 1) -> str:
        """Return the reason why `acquire` would refuse; "" if it would not."""
        reason = self._excess_text(self.usage(client), self._client_bound, count, num_bytes, "a client")
        return reason or self._excess_text(self._total, self._total_bound, count, num_bytes, "all clients")

    def release(self, client: Hashable, num_bytes: int, count: int = 1) -> None:
        self._change_usage(client, self._usage[client], -count, -num_bytes)

    def move(self, previous: Hashable, client: Hashable) -> None:
        """Move the counts of `previous` to `client`, even if their sum exceeds a bound."""
        count, num_bytes = self._usage.pop(previous, (0, 0))
        self._total = (self._total[0] - count, self._total[1] - num_bytes)
        self._change_usage(client, self.usage(client), count, num_bytes)

    def usage(self, client: Hashable) -> tuple[int, int]:
        return self._usage.get(client, (0, 0))

    @property
    def total(self) -> tuple[int, int]:
        """Count and bytes of all items of all clients."""
        return self._total

    def _change_usage(self, client: Hashable, usage: tuple[int, int], count: int, num_bytes: int) -> None:
        new_usage = (usage[0] + count, usage[1] + num_bytes)
        assert min(new_usage) >= 0, f"{client!r} gives back more than it took"
        self._total = (self._total[0] + count, self._total[1] + num_bytes)
        if new_usage == (0, 0):
            self._usage.pop(client, None)
        else:
            self._usage[client] = new_usage

    def _excess_text(self, usage: tuple[int, int], bound: Bound, count: int, num_bytes: int, holder: str) -> str:
        if count > bound.count or num_bytes > bound.num_bytes:
            return (
                f"{PERMANENT_REFUSAL}{count} with {num_bytes} bytes together is beyond the limit of {bound.count} "
                f"with {bound.num_bytes} bytes for {holder}"
            )
        if usage[0] + count > bound.count:
            usage_text = f"{usage[0]} {self._resource_text} already"
            return f"{usage_text}, and {count} more is beyond the limit of {bound.count} for {holder}"
        if usage[1] + num_bytes > bound.num_bytes:
            return (
                f"{usage[0]} {self._resource_text} already with {usage[1]} bytes,"
                f" and {num_bytes} more is beyond the limit of {bound.num_bytes} for {holder}"
            )
        return ""


def refusal_text(reason: str) -> str:
    """Return the text sent to a client whose request `Allowance` refused. It starts with "the engine is behind"
    if the refusal is temporary.
    """
    return reason if reason.startswith(PERMANENT_REFUSAL) else f"the engine is behind: {reason}"
