"""Temporarily reduced step limits, after a step that failed or for which there was not enough memory.

Another process may have taken the memory: without this, each step would fail first and be split each time. Owns how far
the limits are reduced and when they are restored; they apply in addition to those that users set, and the smaller ones
win.
"""

from __future__ import annotations

from typing import Final, Protocol

from kvscope_telemetry.plural import counted

CALM_NS: Final = 30_000_000_000
"""Time without lack of memory before the limits begin to rise again, in nanoseconds."""
NEXT_NS: Final = 2_000_000_000
"""Time from one doubling to the next, in nanoseconds: thirteen doublings, from 1 token to 8,192, take less than a
minute."""


class Limited(Protocol):
    """Interface of `scheduler.Scheduler` that is used here."""

    max_num_batched_tokens: int
    max_num_seqs: int

    def ease(self, limits: tuple[int, int] | None) -> None:
        """Temporarily limit steps to (tokens, requests); None removes the limit."""


class EasedLimits:
    """Reduces the limits of one scheduler.

    It is notified of each step and of idle time, by the engine's clock in nanoseconds.
    """

    def __init__(self, scheduler: Limited) -> None:
        self._scheduler = scheduler
        self._ours: tuple[int, int] | None = None
        self._due_ns = 0

    @property
    def is_eased(self) -> bool:
        return self._ours is not None

    def look(self, now_ns: int, room_tokens: int | None = None, why: str = "had no memory") -> str:
        """Update the limits after a step or idle time. Returns a one-line message, or "" if there is nothing to report.

        Args:
            now_ns: Time on the engine's clock.
            room_tokens: Tokens for which there seemed to be memory; None if it sufficed, or if smaller steps do not
                help (`StepOutcome.room_tokens`).
            why: What happened to the step, for the message.
        """
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
        """Reduce tokens first, down to one per request; then requests."""
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
