"""Smaller steps for a while after one for which there was no memory, though it had been planned for.

Somebody else may have taken it: without this each step would fail first, and be cut each time. Owns which limits are
lowered and when they come back; the scheduler knows limits alone, and who sets them meanwhile is obeyed.
"""

from __future__ import annotations

from typing import Final

from kvscope_engine.policy.scheduling.scheduler import Scheduler

CALM_NS: Final = 30_000_000_000
"""Without a lack of memory before the limits begin to come back."""
NEXT_NS: Final = 2_000_000_000
"""From one doubling to the next: thirteen of them, from a token to 8,192, are over within a minute of the lack."""


class EasedLimits:
    """Of one scheduler; told of each step, and of idle time. Times are of the engine's clock, in nanoseconds."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._asked = self._ours = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        self._due_ns = 0

    @property
    def is_eased(self) -> bool:
        """Whether steps are smaller than was asked for."""
        return self._ours != self._asked

    def look(self, now_ns: int, room_tokens: int | None = None) -> str:
        """`room_tokens`: see `StepOutcome`. What changed, on one line; empty: nothing that is worth telling."""
        now = self._scheduler.max_num_batched_tokens, self._scheduler.max_num_seqs
        self._asked = _where(now, self._ours, self._asked)
        self._ours = now
        if room_tokens is not None:
            return self._lower(room_tokens, now_ns)
        eased = self._ours
        while self.is_eased and now_ns >= self._due_ns:
            self._due_ns += NEXT_NS
            self._set(*(min(asked, 2 * ours) for asked, ours in zip(self._asked, self._ours, strict=True)))
        return "" if self.is_eased or self._ours == eased else f"steps have up to {self._words} again"

    def _lower(self, room_tokens: int, now_ns: int) -> str:
        """Tokens first, down to one a request; then requests."""
        self._due_ns = now_ns + CALM_NS
        eased = self._ours
        num_tokens, num_seqs = (min(ours, max(1, room_tokens)) for ours in eased)
        self._set(num_tokens, num_seqs)
        return "" if self._ours == eased else f"a step had no memory: steps have up to {self._words} for now"

    def _set(self, num_tokens: int, num_seqs: int) -> None:
        self._ours = num_tokens, num_seqs
        self._scheduler.set_limits(num_seqs, num_tokens)

    @property
    def _words(self) -> str:
        num_tokens, num_seqs = self._ours
        return f"{num_tokens} tokens of {num_seqs} requests"


def _where(now: tuple[int, int], ours: tuple[int, int], asked: tuple[int, int]) -> tuple[int, int]:
    """What is asked for: limits that somebody else changed are now what they say."""
    tokens, seqs = (
        mine if there == set_here else there for there, set_here, mine in zip(now, ours, asked, strict=True)
    )
    return tokens, seqs
