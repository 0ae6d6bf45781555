"""Preemption: the order of victims (`victim_order`), and how a victim's blocks are freed (swap or recomputation).

The scheduler chooses the victim (`Scheduler._allocate_or_preempt`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvscope_engine.policy.block_needs import num_blocks_for
from kvscope_engine.policy.kv_offload.lower_tiers import LowerTiers
from kvscope_engine.policy.kv_offload.swap_costs import PrefillRate
from kvscope_engine.policy.ranked_queue import rank
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.block_tables import BlockTables
from kvscope_engine.policy.scheduling.plan_builder import PlanBuilder
from kvscope_engine.policy.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class PreemptionRecord:
    """Blocks and tokens freed by a preemption, and the cost estimates that decided between swap and recompute."""

    num_blocks: int
    num_tokens: int
    """Number of computed tokens in the freed blocks."""
    is_swapped: bool
    has_state: bool
    """Whether the model has recurrent layers, whose state was swapped or dropped together with the blocks."""
    swap_seconds: float | None
    """Estimated time to copy the blocks to a lower tier and back; None without a lower tier."""
    recompute_seconds: float | None
    """Estimated time to compute the tokens again; None before the first measurement."""


def victim_order(request: Request, held_tokens: int) -> tuple[int, ...]:
    """Return the sort key for preemption. The request with the smallest key is preempted first.

    Order: lowest priority; then the client (or batch) that holds the most tokens; then the fewest previous preemptions;
    then the latest arrival. `held_tokens`: tokens of all running requests of the same client (or batch), as counted at
    their admission.

    Preemption terminates: a request is admitted only if all its known tokens fit, so each preemption is preceded by
    tokens generated since the admission, which are not lost. No request is preempted twice before every other request
    of its client was preempted once.
    """
    _, arrival_ns, number = rank(request)
    return (request.priority, -held_tokens, request.num_preemptions, -arrival_ns, -number)


_REASONS: Final = ("priority", "share", "spared", "newest", "newest")
"""Value of `EventData.choice` for each element of the `victim_order` key, if that element decided."""


def victim_choice(victim: Request, needy: Request, order: Callable[[Request], tuple[int, ...]]) -> tuple[str, int]:
    """Return why `victim` is preempted rather than `needy`, as `EventData.choice` and `choice_number`.

    `order` returns the `victim_order` key of a request. Call this before the victim's blocks are freed.
    """
    if victim is needy:
        return "itself", 0
    keys = zip(order(victim), order(needy), strict=True)
    reason = _REASONS[next(index for index, (one, other) in enumerate(keys) if one != other)]
    return reason, {"priority": victim.priority, "spared": victim.num_preemptions}.get(reason, 0)


class Preemption:
    """Frees a victim's blocks by swapping them out or dropping them for recomputation.

    `mode` is `recompute`, `swap` (recompute if the lower tier has no space) or `auto` (whichever is cheaper by measured
    rates; swap until recomputation has been measured). The recurrent state of a request is swapped or dropped together
    with its blocks, since neither is of use alone.
    """

    def __init__(
        self,
        tables: BlockTables,
        tiers: LowerTiers | None,
        rate: PrefillRate,
        block_size: int,
        mode: str,
        states: StatePool | None = None,
    ) -> None:
        self._tables = tables
        self._tiers = tiers
        self._rate = rate
        self._block_size = block_size
        self._mode = mode
        self._states = states

    def free_blocks(self, victim: Request, step: int, builder: PlanBuilder) -> PreemptionRecord:
        """Swap out or free the blocks of `victim` and remove it from the plan. Its tokens are kept.

        The caller returns the victim to the queue.
        """
        record = self._free_blocks(victim, step, builder, self._mode)
        assert record is not None, "only a requested swap can be refused"
        return record

    def free_blocks_by_request(
        self, victim: Request, step: int, builder: PlanBuilder, how: str
    ) -> PreemptionRecord | None:
        """Free the blocks like `free_blocks`, in the way that a user requested.

        `how` is `recompute`, `swap`, or "" for the configured mode. Returns None, and does nothing, if a swap was
        requested and is not possible.
        """
        return self._free_blocks(victim, step, builder, how or self._mode, requires_swap=how == "swap")

    def _free_blocks(
        self, victim: Request, step: int, builder: PlanBuilder, mode: str, *, requires_swap: bool = False
    ) -> PreemptionRecord | None:
        tokens, num_blocks = victim.num_computed_tokens, len(victim.held_blocks)
        swap, recompute = self._swap_seconds(victim), self._rate.seconds(tokens)
        swapped = _prefers_swap(mode, swap, recompute) and self._swap_out(victim, step, builder)
        if requires_swap and not swapped:
            return None
        builder.drop(victim)
        victim.num_lost_tokens = max(victim.num_lost_tokens, tokens)
        if not swapped:
            self._tables.release(victim, step)
            if self._states is not None:
                self._states.release(victim)
        victim.num_computed_tokens = 0
        return PreemptionRecord(num_blocks, tokens, swapped, self._states is not None, swap, recompute)

    def _swap_out(self, victim: Request, step: int, builder: PlanBuilder) -> bool:
        """Swap out both blocks and recurrent state, or neither. Returns whether they were swapped out."""
        states = self._states
        if states is not None and not states.can_swap_out:
            return False
        is_swapped = self._tables.swap_out(victim, step, builder)
        if is_swapped and states is not None:
            states.swap_out(victim)
        return is_swapped

    def _swap_seconds(self, victim: Request) -> float | None:
        states = self._states
        if self._tiers is None or (states is not None and not states.num_host_slots):
            return None
        num_filled = num_blocks_for(victim.num_computed_tokens, self._block_size)
        seconds = self._tiers.swap_seconds(sum(num_filled - num_null for num_null in victim.num_null_blocks))
        return seconds if states is None else seconds + 2 * states.copy_seconds


def _prefers_swap(mode: str, swap: float | None, recompute: float | None) -> bool:
    if swap is None or mode == "recompute":
        return False
    return mode == "swap" or recompute is None or swap < recompute
