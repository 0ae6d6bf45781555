"""Async scheduling: where requests will be after the step in flight, and why planning ahead may be impossible.

A request with a token in flight is scheduled for one more before that token is known, even if the sampling of the next
one depends on it: grammars and penalties are evaluated when that one is sampled. Only counts differ from what the
requests know, so the scheduler asks for nothing else here. Owns nothing of a request: the step in flight is still to be
committed, and `Request.num_computed_tokens` and the tokens remain unchanged until then.
"""

from __future__ import annotations

from typing import Final

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import StepPlan

RESERVED: Final = "an allocator that reserves"
STATES: Final = "recurrent layers, whose states a step that is tried again would change twice"
DRAFTED: Final = "drafts of what follows the tokens"
FORKED: Final = "completions that share their prompt"
SHARED: Final = "a prompt in progress that others may share"
FAIRNESS: Final = "a turn for a client or a batch that runs nothing"
SHORT: Final = "no free block for each request"


class PlannedProgress:
    """The requests' progress after the step in flight; nothing is in flight if `plan` is None."""

    def __init__(self, plan: StepPlan | None = None) -> None:
        self._items = {item.request.number: item for item in plan.scheduled} if plan is not None else {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def span(self, request: Request) -> tuple[int, int]:
        """Return the position of the first token that is neither computed nor in flight, and the number of tokens known
        by then.

        Tokens sampled by the step in flight count as known.
        """
        item = self._items.get(request.number)
        if item is None:
            return request.num_computed_tokens, request.num_prompt_tokens + len(request.output_token_ids)
        return item.start + item.num_tokens, request.num_tokens + item.samples

    def ends(self, request: Request) -> bool:
        """Whether the request's token in flight reaches `max_tokens`: nothing may be scheduled after it."""
        item = self._items.get(request.number)
        return item is not None and item.samples and len(request.output_token_ids) + 1 >= request.max_tokens


def computes_prompts(plan: StepPlan) -> bool:
    """Whether the step completes blocks of a prompt, which another prompt could then find in the prefix cache."""
    return any(item.start < item.request.num_prompt_tokens for item in plan.scheduled)
