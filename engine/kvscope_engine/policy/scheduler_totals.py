"""Counters of the scheduler since the start. `messages.telemetry.Counters` publishes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerTotals:
    """Counters that only the scheduler writes.

    Fields without a docstring have the meaning of the same fields in `messages.telemetry.Counters`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    admitted: int = 0
    """Number of requests admitted for the first time; admissions after a preemption are not counted."""
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    swapped_blocks: int = 0
    offloaded_blocks: int = 0
    loaded_blocks: int = 0
    copied_blocks: int = 0
    lost_blocks: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def count_admission(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count the prompt tokens of a first admission, as cached or as to be computed."""
        self.cached_tokens += num_cached_tokens
        self.prompt_tokens += max(0, num_prompt_tokens - num_cached_tokens)
