"""The scheduler's plan for one step, and the runner's result of it. Values, no behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.commands import TokenLogprobs


class Scheduled(NamedTuple):
    """A request and how many of its tokens run in this step. (A tuple: a frozen dataclass takes 4 times as long.)

    The tokens are positions `start` to `start + num_tokens`; blocks for them are in the request's table.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the last of them is the last known token, so that a new one is sampled after it."""
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens after the last known one, which run behind it and are counted in `num_tokens`; a token is
    sampled after each. Once the step is over, `num_tokens` is that of the tokens that turned out to be right."""


class StateSave(NamedTuple):
    """The state of a request's recurrent layers after its first `num_tokens` tokens goes to a slot of its own."""

    request: Request
    num_tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: single-token (decode) requests first, then those with drafts, then prefill chunks."""

    scheduled: tuple[Scheduled, ...]
    num_single_token: int
    """How many of `scheduled`, from the first, compute exactly one token."""
    copies: tuple[tuple[int, int], ...] = ()
    """Blocks to copy, (from, to), before anything is written: copy on write."""
    state_copies: tuple[tuple[int, int], ...] = ()
    """Slots of recurrent states to copy, (from, to), one after the other before the step."""
    state_saves: tuple[StateSave, ...] = ()
    """States to keep amid the step, each after tokens that run in it."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def changes_states(self) -> bool:
        """Whether it goes on from states of recurrent layers, so that it cannot be run a second time."""
        return any(item.request.state_slot >= 0 for item in self.scheduled)

    @property
    def has_drafts(self) -> bool:
        """Whether tokens run that are only guessed."""
        return any(item.drafts for item in self.scheduled[self.num_single_token :])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out, one entry for each of `StepPlan.scheduled`."""

    token_ids: tuple[tuple[int, ...], ...]
    """The tokens that follow, in their order; none where the prefill goes on. With drafts: as many of them as are
    what was sampled in their place, and the one after."""
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """One for each of these tokens where they were asked for; empty when no request asked for any."""
    forward_ns: int = 0
    block_shares: NDArray[np.float32] | None = None
    """(groups, num_single_token, blocks): the share of each decode's attention, in the layers of each KV group, that
    fell on each of its blocks; None where it was not measured."""
    graph_size: int = 0
    """Requests that the CUDA graph it ran as has room for; 0: it ran without one."""
    wait_ns: int = 0
    """The host stood still until it was there."""
    block_skips: NDArray[np.float32] | None = None
    """(num_single_token, blocks): of the layers and KV heads that choose among blocks, the share that passed over each
    of each decode's; None where it was not counted."""
    launches: int = 0
    """That the forward pass was handed to the device in; 0: not counted."""
    graph_tokens: int = 0
    """Tokens that the CUDA graphs have room for that it ran as between attention; 0: it ran without them."""
    logit_sums: tuple[tuple[int, ...], ...] = ()
    """Of each entry, for each token that follows, the sum of its logits' bits; empty where nobody asked."""


def without_ended(plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
    """What is left of both once the rows of requests that ended while they ran are taken out."""
    return keep_items(plan, result, [not item.request.is_finished for item in plan.scheduled])


def to_run_again(plan: StepPlan) -> StepPlan:
    """What is left of a plan that waited: without requests that ended meanwhile, and without those whose form does not
    say yet which token may come, which sit the step out."""
    is_kept = [
        not item.request.is_finished and not (item.samples and item.request.awaits_its_form) for item in plan.scheduled
    ]
    return keep_items(plan, StepResult(((),) * len(plan.scheduled)), is_kept)[0]


def keep_items(plan: StepPlan, result: StepResult, is_kept: Sequence[bool]) -> tuple[StepPlan, StepResult]:
    """What is left of both once the rows of some requests are taken out, as if they had not run."""
    kept = [index for index, keeps in enumerate(is_kept) if keeps]
    if len(kept) == len(plan.scheduled):
        return plan, result
    num_single_token = sum(index < plan.num_single_token for index in kept)
    logprobs = tuple(result.logprobs[index] for index in kept) if result.logprobs else ()
    decodes = kept[:num_single_token]
    shares = None if result.block_shares is None else result.block_shares[:, decodes]
    skips = None if result.block_skips is None else result.block_skips[decodes]
    sums = tuple(result.logit_sums[index] for index in kept) if result.logit_sums else ()
    how = (result.graph_size, result.wait_ns, skips, result.launches, result.graph_tokens, sums)
    requests = {plan.scheduled[index].request for index in kept}
    return (
        replace(
            plan,
            scheduled=tuple(plan.scheduled[index] for index in kept),
            num_single_token=num_single_token,
            state_saves=tuple(save for save in plan.state_saves if save.request in requests),
        ),
        StepResult(tuple(result.token_ids[index] for index in kept), logprobs, result.forward_ns, shares, *how),
    )


def keep_emitted(plan: StepPlan, result: StepResult, num_emitted: Sequence[int]) -> tuple[StepPlan, StepResult]:
    """Return plan and result cut to the `num_emitted` tokens of each entry: wrong drafts, and drafts behind an end,
    count as not run.
    """
    scheduled = tuple(
        item._replace(num_tokens=said) if item.drafts else item
        for item, said in zip(plan.scheduled, num_emitted, strict=True)
    )
    token_ids = tuple(ids[:said] for ids, said in zip(result.token_ids, num_emitted, strict=True))
    return replace(plan, scheduled=scheduled), replace(result, token_ids=token_ids)


def without_drafts(plan: StepPlan) -> StepPlan:
    """The plan's decodes alone, a token each."""
    drafted = [item._replace(num_tokens=1, drafts=()) for item in plan.scheduled if item.drafts]
    singles = (*plan.scheduled[: plan.num_single_token], *drafted)
    return replace(plan, scheduled=singles, num_single_token=len(singles))
