"""Preemption: who gives up its blocks when a running request needs one and there is none, and what becomes of them.

They are computed again later, or moved to a lower tier until then.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvscope_engine.policy.fit import num_blocks_for
from kvscope_engine.policy.ranked_queue import rank
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.block_tables import BlockTables
from kvscope_engine.policy.scheduling.plan_builder import PlanBuilder
from kvscope_engine.policy.state_pool import StatePool
from kvscope_engine.policy.tiers.lower_tiers import LowerTiers
from kvscope_engine.policy.tiers.swap_costs import PrefillRate


@dataclass(frozen=True, slots=True)
class GivenUp:
    """How a request gave up its blocks, and what was known of the costs."""

    num_blocks: int
    """Blocks it had."""
    num_tokens: int
    """Tokens computed in them."""
    is_swapped: bool
    has_state: bool
    """Whether the state of its recurrent layers shared their fate."""
    swap_seconds: float | None
    """To a lower tier and back, as measured; None without one."""
    recompute_seconds: float | None
    """None before anything was measured."""


def victim_order(request: Request, held_tokens: int) -> tuple[int, ...]:
    """Sorts running requests by who gives up its blocks first; `held_tokens` are those of its client, or batch.

    The lowest priority; among those, of who holds the most; of its requests the least often preempted; then the newest.
    So nobody is preempted twice before another of its client's was once. It ends all the same: a request is admitted
    only when all it knows fits, so each preemption follows tokens that were generated since, and those are kept.
    """
    _, arrival_ns, number = rank(request)
    return (request.priority, -held_tokens, request.num_preemptions, -arrival_ns, -number)


class Preemption:
    """Chooses by `mode`: `recompute`, `swap` (while there is room), or `auto`, what costs less as measured.

    Where a model has recurrent layers a request's state goes where its blocks go: neither is of use alone.
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

    def give_up(self, victim: Request, step: int, builder: PlanBuilder) -> GivenUp:
        """Take all blocks from a request that no longer runs, and out of the plan. It keeps its tokens."""
        given_up = self._give_up(victim, step, builder, self._mode)
        assert given_up is not None, "only who insists on a swap is told that there is no room"
        return given_up

    def give_up_asked(self, victim: Request, step: int, builder: PlanBuilder, how: str) -> GivenUp | None:
        """The same as somebody asked: `recompute`, `swap`, or "" as the engine does.

        None, and nothing done, when a swap was asked for and cannot be.
        """
        return self._give_up(victim, step, builder, how or self._mode, insists=how == "swap")

    def _give_up(
        self, victim: Request, step: int, builder: PlanBuilder, mode: str, *, insists: bool = False
    ) -> GivenUp | None:
        tokens, num_blocks = victim.num_computed_tokens, len(victim.held_blocks)
        swap, recompute = self._swap_seconds(victim), self._rate.seconds(tokens)
        swapped = _prefers_swap(mode, swap, recompute) and self._swap_out(victim, step, builder)
        if insists and not swapped:
            return None
        builder.drop(victim)
        victim.num_lost_tokens = max(victim.num_lost_tokens, tokens)
        if not swapped:
            self._tables.release(victim, step)
            if self._states is not None:
                self._states.release(victim)
        victim.num_computed_tokens = 0
        return GivenUp(num_blocks, tokens, swapped, self._states is not None, swap, recompute)

    def _swap_out(self, victim: Request, step: int, builder: PlanBuilder) -> bool:
        """Blocks and state, or neither."""
        states = self._states
        if states is not None and not states.has_room_below:
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
        seconds = self._tiers.swap_seconds(sum(num_filled - let_go for let_go in victim.num_let_go))
        return seconds if states is None else seconds + 2 * states.copy_seconds


def _prefers_swap(mode: str, swap: float | None, recompute: float | None) -> bool:
    if swap is None or mode == "recompute":
        return False
    return mode == "swap" or recompute is None or swap < recompute
