"""Async scheduling: progress of the requests after the step in flight, and reasons why planning ahead is impossible.

A request with a token in flight is scheduled for another token before the value of the first is known. Grammars and
penalties that depend on the value are evaluated when the next token is sampled. The step in flight is not committed
yet, so `Request.num_computed_tokens` and the output tokens do not include it. This module only computes the counts that
include it, and changes no request.
"""

from __future__ import annotations

from typing import Final

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import StepPlan

RESERVING_ALLOCATOR: Final = "an allocator that reserves"
RECURRENT_STATES: Final = "recurrent layers, whose states a step that is tried again would change twice"
PENDING_DRAFTS: Final = "drafts of what follows the tokens"
SHARED_PROMPT: Final = "completions that share their prompt"
PROMPT_IN_PROGRESS: Final = "a prompt in progress that others may share"
FAIRNESS: Final = "a turn for a client or a batch that runs nothing"
TOO_FEW_BLOCKS: Final = "no free block for each request"


class PlannedProgress:
    """Progress of the requests after the step in flight, `plan`, which is None if no step is in flight."""

    def __init__(self, plan: StepPlan | None = None) -> None:
        self._items = {item.request.number: item for item in plan.scheduled} if plan is not None else {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def span(self, request: Request) -> tuple[int, int]:
        """Return the first position that is neither computed nor in flight, and the number of tokens known after the
        step in flight.

        The tokens that the step in flight samples count as known.
        """
        item = self._items.get(request.number)
        if item is None:
            return request.num_computed_tokens, request.num_prompt_tokens + len(request.output_token_ids)
        return item.start + item.num_tokens, request.num_tokens + item.samples

    def ends(self, request: Request) -> bool:
        """Whether the request's token in flight is its last one allowed by `max_tokens`, so that nothing may be
        scheduled after it.
        """
        item = self._items.get(request.number)
        return item is not None and item.samples and len(request.output_token_ids) + 1 >= request.max_tokens


def computes_prompts(plan: StepPlan) -> bool:
    """Whether the step computes prompt tokens, so that it may complete blocks that another prompt could reuse."""
    return any(item.start < item.request.num_prompt_tokens for item in plan.scheduled)
