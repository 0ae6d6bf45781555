"""Scheduling a step while the one before it runs: where its requests will be by then, and when that cannot be known.

A request with a token in flight is scheduled for one more without anybody knowing what that token is, whatever its
next one depends on: a form and penalties are looked at when that is sampled. Only counts differ from what the requests
know, so this is all that the scheduler asks here. Owns nothing of a request: the step
in flight is still to be committed, and `Request.num_computed_tokens` and its tokens stay as they are until then.
"""

from __future__ import annotations

from typing import Final

from kvscope_engine.policy.plan import StepPlan
from kvscope_engine.policy.request import Request

RESERVED: Final = "an allocator that reserves"
STATES: Final = "recurrent layers, whose states a step that is tried again would change twice"
DRAFTED: Final = "drafts of what follows the tokens"
FORKED: Final = "completions that share their prompt"
SHARED: Final = "a prompt in progress that others may share"
TURN: Final = "a turn for a client or a batch that runs nothing"
SHORT: Final = "no free block for each request"


class Ahead:
    """What the step in flight will have done; nothing is in flight where `plan` is None."""

    def __init__(self, plan: StepPlan | None = None) -> None:
        self._items = {item.request.number: item for item in plan.scheduled} if plan is not None else {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def span(self, request: Request) -> tuple[int, int]:
        """Its tokens that are neither computed nor in flight: where they start, and how many are known by then, those
        that are sampled in flight among them."""
        item = self._items.get(request.number)
        if item is None:
            return request.num_computed_tokens, request.num_prompt_tokens + len(request.output_token_ids)
        return item.start + item.num_tokens, request.num_tokens + item.samples

    def ends(self, request: Request) -> bool:
        """Whether its token in flight is its last, whatever it is: nothing may be scheduled past it."""
        item = self._items.get(request.number)
        return item is not None and item.samples and len(request.output_token_ids) + 1 >= request.max_tokens


def computes_prompts(plan: StepPlan) -> bool:
    """Whether full blocks of a prompt come out of this step, which another prompt could find."""
    return any(item.start < item.request.num_prompt_tokens for item in plan.scheduled)
