"""What the scheduler counts. Totals since the start; `messages.Counters` shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Only the scheduler writes these."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    """These four as in `messages.Counters`."""
    preemptions: int = 0
    admitted: int = 0
    """First admissions; a request that comes back after a preemption is not counted again."""
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    swapped_blocks: int = 0
    offloaded_blocks: int = 0
    loaded_blocks: int = 0
    copied_blocks: int = 0
    lost_blocks: int = 0
    """These five as in `messages.Counters`."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Both as there."""

    def begin(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request runs for the first time, with so much of its prompt found."""
        self.cached_tokens += num_cached_tokens
        self.prompt_tokens += max(0, num_prompt_tokens - num_cached_tokens)
