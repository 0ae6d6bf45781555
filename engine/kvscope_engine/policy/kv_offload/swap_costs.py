"""Cost of recomputing tokens, measured while the engine runs, for comparison with the cost of copying their blocks.

Owns the prefill rate. The cost of a copy is measured by the `TierMover`.
"""

from __future__ import annotations

from typing import Final

from kvscope_engine.policy.step_plan import StepPlan

MIN_TOKENS: Final = 16
"""Minimum number of tokens of a step whose duration is measured, because smaller prefills take as long as a decode."""
WEIGHT: Final = 0.2
"""Weight of the newest measurement in the exponential mean."""


class PrefillRate:
    """Seconds per token of prefill: exponential mean over steps in which more than half of the tokens were prefill."""

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Include a step that took `seconds` in the mean, if more than half of its tokens were prefill."""
        num_tokens = plan.num_tokens
        if num_tokens < MIN_TOKENS or plan.num_single_token * 2 > num_tokens or plan.has_drafts:
            return
        measured = seconds / num_tokens
        known = self._seconds_per_token
        self._seconds_per_token = measured if known is None else known + WEIGHT * (measured - known)

    def seconds(self, num_tokens: int) -> float | None:
        """Return the estimated time to compute `num_tokens` tokens, in seconds; None before the first measurement."""
        return None if self._seconds_per_token is None else num_tokens * self._seconds_per_token
