"""Temporarily reduced step limits, after a step that failed or for which there was not enough memory.

The memory may be in use by another process for a while. Without reduced limits, each following step would first fail
and then be split. Owns the reduced limits and the time of their next increase; `BatchLimits` applies them in addition
to the configured limits.
"""

from __future__ import annotations

from typing import Final

from kvscope_engine.policy.scheduling.batch_limits import BatchLimits
from kvscope_telemetry.plural import counted

RECOVERY_DELAY_NS: Final = 30_000_000_000
"""Time without a failed step before the limits begin to rise again, in nanoseconds."""
DOUBLING_INTERVAL_NS: Final = 2_000_000_000
"""Time from one doubling of the limits to the next, in nanoseconds. Thirteen doublings, from 1 token to 8,192, take
less than a minute.
"""


class ReducedLimits:
    """Reduces the limits of one scheduler temporarily.

    Call `update` after each step and while idle. Times are nanoseconds on the engine's clock.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._current: tuple[int, int] | None = None
        self._due_ns = 0

    @property
    def is_reduced(self) -> bool:
        return self._current is not None

    def update(self, now_ns: int, fitting_tokens: int | None = None, why: str = "ran out of memory") -> str:
        """Update the limits after a step or idle time. Returns a one-line message, or "" if there is nothing to report.

        Args:
            now_ns: Time on the engine's clock.
            fitting_tokens: Estimated number of tokens for which there was memory; None if the memory sufficed, or if
                smaller steps do not help (`StepOutcome.fitting_tokens`).
            why: What happened to the step, for the message.
        """
        configured = self._limits.max_num_batched_tokens, self._limits.max_num_seqs
        if fitting_tokens is not None:
            return self._lower(configured, fitting_tokens, now_ns, why)
        if self._current is None:
            return ""
        while self._current is not None and now_ns >= self._due_ns:
            self._due_ns += DOUBLING_INTERVAL_NS
            twice = 2 * self._current[0], 2 * self._current[1]
            self._current = None if twice[0] >= configured[0] and twice[1] >= configured[1] else twice
        self._limits.reduce(self._current)
        return "" if self._current is not None else f"steps have up to {_limits_text(configured)} again"

    def _lower(self, configured: tuple[int, int], fitting_tokens: int, now_ns: int, why: str) -> str:
        """Reduce the token limit first, down to one token per request, and then the limit of requests."""
        self._due_ns = now_ns + RECOVERY_DELAY_NS
        before = (
            configured
            if self._current is None
            else (min(configured[0], self._current[0]), min(configured[1], self._current[1]))
        )
        limit = max(1, fitting_tokens)
        lower = min(before[0], limit), min(before[1], limit)
        if lower == before:
            return ""
        self._current = lower
        self._limits.reduce(lower)
        return f"a step {why}: steps have up to {_limits_text(lower)} for now"


def _limits_text(limits: tuple[int, int]) -> str:
    num_tokens, num_seqs = limits
    return f"{counted(num_tokens, 'token')} of {counted(num_seqs, 'request')}"
