"""What it costs to compute tokens again against moving their blocks, as measured while the engine runs.

Owns the rate at which prompts are computed. What a copy costs is the mover's to say (`TierMover`).
"""

from __future__ import annotations

from typing import Final

from kvscope_engine.policy.plan import StepPlan

MIN_TOKENS: Final = 16
"""Of a step that tells anything about prefill: smaller ones cost the same as a decode."""
WEIGHT: Final = 0.2
"""Of the newest measurement."""


class PrefillRate:
    """Seconds a token of prefill, an exponential mean over the steps that mostly computed prompts."""

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """The step took `seconds`."""
        num_tokens = plan.num_tokens
        if num_tokens < MIN_TOKENS or plan.num_single_token * 2 > num_tokens or plan.has_drafts:
            return
        measured = seconds / num_tokens
        known = self._seconds_per_token
        self._seconds_per_token = measured if known is None else known + WEIGHT * (measured - known)

    def seconds(self, num_tokens: int) -> float | None:
        """To compute `num_tokens` tokens; None before anything was measured."""
        return None if self._seconds_per_token is None else num_tokens * self._seconds_per_token
