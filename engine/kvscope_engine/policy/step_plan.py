"""The scheduler's plan for one step, and the runner's result: values, and functions that filter their entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.commands import TokenLogprobs


class Scheduled(NamedTuple):
    """A request and its tokens that run in this step, at positions `start` to `start + num_tokens` (exclusive).

    The request's block table has blocks for these tokens. The class is a NamedTuple, because a frozen dataclass takes 4
    times as long to create.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the last of the scheduled tokens is the request's last known token, after which a new token is
    sampled.
    """
    drafts: tuple[int, ...] = ()
    """Draft tokens after the last known token, counted in `num_tokens`. A token is sampled after each of them.

    After the step, `num_tokens` counts only accepted drafts.
    """


class StateSave(NamedTuple):
    """Planned copy of a request's recurrent state to a separate slot, made when the state covers the request's
    first `num_tokens` tokens.
    """

    request: Request
    num_tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one step: single-token (decode) requests first, then requests with drafts, then prefill chunks."""

    scheduled: tuple[Scheduled, ...]
    num_single_token: int
    """Number of leading entries of `scheduled` that compute exactly one token."""
    copies: tuple[tuple[int, int], ...] = ()
    """Copy-on-write block copies, (from, to), made before the step writes anything."""
    state_copies: tuple[tuple[int, int], ...] = ()
    """Copies between slots of recurrent states, (from, to), made in this order before the step."""
    state_saves: tuple[StateSave, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def changes_states(self) -> bool:
        """Whether the step updates recurrent states, so that it cannot be run a second time."""
        return any(item.request.state_slot >= 0 for item in self.scheduled)

    @property
    def has_drafts(self) -> bool:
        return any(item.drafts for item in self.scheduled[self.num_single_token :])


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step, one entry for each of `StepPlan.scheduled`."""

    token_ids: tuple[tuple[int, ...], ...]
    """New tokens of each entry in order; empty if the entry's prefill is not complete.

    With drafts, these are the accepted drafts and one more token.
    """
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """Log-probabilities of the tokens in `token_ids` whose requests asked for them; empty if no request did."""
    forward_ns: int = 0
    block_shares: NDArray[np.float32] | None = None
    """Fraction of each decode's attention on each of its blocks, shape (groups, num_single_token, blocks).

    It is averaged over the layers of each KV group. None if it was not measured.
    """
    graph_size: int = 0
    """Batch size for which the step's CUDA graph was captured, in requests; 0 if no graph was used."""
    wait_ns: int = 0
    """Time for which the host was blocked waiting for the result, in nanoseconds."""
    block_skips: NDArray[np.float32] | None = None
    """Fraction of the sparse layers' KV heads that skipped each block of each decode, shape (num_single_token, blocks).

    None if it was not counted.
    """
    launches: int = 0
    """Number of kernel or graph launches of the forward pass; 0 if they were not counted."""
    graph_tokens: int = 0
    """Number of tokens for which the piecewise CUDA graphs (between attention) were captured; 0 if none were used."""
    logit_sums: tuple[tuple[int, ...], ...] = ()
    """Checksums of the logits (sums of their bits), one per new token of each entry; empty if not requested."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """Log-probabilities of the prompt tokens that follow the entry's computed tokens; empty if no request asked for
    them.
    """


def without_ended(plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
    """Return plan and result without the requests that ended while the step ran."""
    return keep_items(plan, result, [not item.request.is_finished for item in plan.scheduled])


def to_run_again(plan: StepPlan) -> StepPlan:
    """Return a plan that failed or was postponed, without the requests that must not run now.

    These are requests that ended in the meantime, and requests whose mask of allowed next tokens is not ready.
    """
    is_kept = [
        not item.request.is_finished and not (item.samples and item.request.awaits_grammar_mask)
        for item in plan.scheduled
    ]
    return keep_items(plan, StepResult(((),) * len(plan.scheduled)), is_kept)[0]


def keep_items(plan: StepPlan, result: StepResult, is_kept: Sequence[bool]) -> tuple[StepPlan, StepResult]:
    """Return plan and result with only the entries marked in `is_kept`, as if the other entries had not run."""
    kept = [index for index, is_item_kept in enumerate(is_kept) if is_item_kept]
    if len(kept) == len(plan.scheduled):
        return plan, result
    num_single_token = sum(index < plan.num_single_token for index in kept)
    logprobs = tuple(result.logprobs[index] for index in kept) if result.logprobs else ()
    decodes = kept[:num_single_token]
    shares = None if result.block_shares is None else result.block_shares[:, decodes]
    skips = None if result.block_skips is None else result.block_skips[decodes]
    sums = tuple(result.logit_sums[index] for index in kept) if result.logit_sums else ()
    scores = tuple(result.prompt_logprobs[index] for index in kept) if result.prompt_logprobs else ()
    step_fields = (result.graph_size, result.wait_ns, skips, result.launches, result.graph_tokens, sums, scores)
    requests = {plan.scheduled[index].request for index in kept}
    return (
        replace(
            plan,
            scheduled=tuple(plan.scheduled[index] for index in kept),
            num_single_token=num_single_token,
            state_saves=tuple(save for save in plan.state_saves if save.request in requests),
        ),
        StepResult(tuple(result.token_ids[index] for index in kept), logprobs, result.forward_ns, shares, *step_fields),
    )


def keep_emitted(plan: StepPlan, result: StepResult, num_emitted: Sequence[int]) -> tuple[StepPlan, StepResult]:
    """Return plan and result with only the first `num_emitted` tokens of each entry.

    Rejected drafts, and drafts after the end of the output, count as not run.
    """
    scheduled = tuple(
        item._replace(num_tokens=count) if item.drafts else item
        for item, count in zip(plan.scheduled, num_emitted, strict=True)
    )
    token_ids = tuple(ids[:count] for ids, count in zip(result.token_ids, num_emitted, strict=True))
    return replace(plan, scheduled=scheduled), replace(result, token_ids=token_ids)


def without_drafts(plan: StepPlan) -> StepPlan:
    """Return a plan with only the decodes of `plan`, one token each."""
    drafted = [item._replace(num_tokens=1, drafts=()) for item in plan.scheduled if item.drafts]
    singles = (*plan.scheduled[: plan.num_single_token], *drafted)
    return replace(plan, scheduled=singles, num_single_token=len(singles))
