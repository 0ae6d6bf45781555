"""Smaller steps for a while after one for which there was no memory, though it had been planned for, or that failed.

Somebody else may have taken it: without this each step would fail first, and be cut each time. Owns how far limits are
lowered and when they come back; those that people set stand beside them, and the smaller ones hold.
"""

from __future__ import annotations

from typing import Final, Protocol

from kvscope_telemetry.plural import counted

CALM_NS: Final = 30_000_000_000
"""Without a lack of memory before the limits begin to come back."""
NEXT_NS: Final = 2_000_000_000
"""From one doubling to the next: thirteen of them, from a token to 8,192, are over within a minute of the lack."""


class Limited(Protocol):
    """As `scheduler.Scheduler`."""

    max_num_batched_tokens: int
    max_num_seqs: int

    def ease(self, limits: tuple[int, int] | None) -> None:
        """Steps have at most so many tokens and requests for now; None: as many as they may."""


class EasedLimits:
    """Of one scheduler; told of each step, and of idle time. Times are of the engine's clock, in nanoseconds."""

    def __init__(self, scheduler: Limited) -> None:
        self._scheduler = scheduler
        self._ours: tuple[int, int] | None = None
        self._due_ns = 0

    @property
    def is_eased(self) -> bool:
        """Whether steps are smaller than was asked for."""
        return self._ours is not None

    def look(self, now_ns: int, room_tokens: int | None = None, why: str = "had no memory") -> str:
        """`room_tokens`: see `StepOutcome`; `why`, of the step. What changed, on one line; empty: nothing that is worth
        telling."""
        asked = self._scheduler.max_num_batched_tokens, self._scheduler.max_num_seqs
        if room_tokens is not None:
            return self._lower(asked, room_tokens, now_ns, why)
        if self._ours is None:
            return ""
        while self._ours is not None and now_ns >= self._due_ns:
            self._due_ns += NEXT_NS
            twice = 2 * self._ours[0], 2 * self._ours[1]
            self._ours = None if twice[0] >= asked[0] and twice[1] >= asked[1] else twice
        self._scheduler.ease(self._ours)
        return "" if self._ours is not None else f"steps have up to {_words(asked)} again"

    def _lower(self, asked: tuple[int, int], room_tokens: int, now_ns: int, why: str) -> str:
        """Tokens first, down to one a request; then requests."""
        self._due_ns = now_ns + CALM_NS
        before = asked if self._ours is None else (min(asked[0], self._ours[0]), min(asked[1], self._ours[1]))
        room = max(1, room_tokens)
        lower = min(before[0], room), min(before[1], room)
        if lower == before:
            return ""
        self._ours = lower
        self._scheduler.ease(lower)
        return f"a step {why}: steps have up to {_words(lower)} for now"


def _words(limits: tuple[int, int]) -> str:
    num_tokens, num_seqs = limits
    return f"{counted(num_tokens, 'token')} of {counted(num_seqs, 'request')}"
