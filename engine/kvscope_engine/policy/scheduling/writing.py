"""Updates the state after a step: counts tokens as computed, fills slots, seals full blocks."""

from __future__ import annotations

from typing import NamedTuple

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.plan import Scheduled, StepPlan
from kvscope_engine.policy.scheduling.request_prefixes import seal_blocks
from kvscope_telemetry.messages.request_state import RequestState


def write_down(plan: StepPlan, pool: BlockPool, step: int) -> int:
    """Advance every request of the plan that still runs; returns how many tokens were computed again, which a
    preemption had lost."""
    written = _Written([], [], [])
    recomputed = 0
    for index, item in enumerate(plan.scheduled):
        request = item.request
        if request.state is not RequestState.RUNNING:
            continue
        request.num_computed_tokens = item.start + item.num_tokens
        if item.start < request.num_lost_tokens:
            recomputed += min(item.num_tokens, request.num_lost_tokens - item.start)
        if index < plan.num_single_token:
            _write_one(item, pool, written)
        else:
            _write_several(item, pool, written)
    pool.write(*written, step)
    return recomputed


class _Written(NamedTuple):
    """What `BlockPool.write` takes, a block an entry."""

    blocks: list[int]
    filled: list[int]
    owners: list[int]


def _write_one(item: Scheduled, pool: BlockPool, written: _Written) -> None:
    """A single token: most of what a busy engine writes down, so without lists of its own."""
    request = item.request
    place, slot = divmod(item.start, pool.block_size)
    for table in request.block_tables:
        written.blocks.append(table[place])
        written.filled.append(slot + 1)
        written.owners.append(request.number)
    if slot + 1 == pool.block_size:
        seal_blocks(pool, request, place, place + 1)


def _write_several(item: Scheduled, pool: BlockPool, written: _Written) -> None:
    request, size = item.request, pool.block_size
    end = item.start + item.num_tokens
    first, stop = item.start // size, -(-end // size)
    for table in request.block_tables:
        written.blocks.extend(table[first:stop])
        written.filled.extend([size] * (stop - first - 1))
        written.filled.append(end - (stop - 1) * size)
        written.owners.extend([request.number] * (stop - first))
    if end // size > first:
        seal_blocks(pool, request, first, end // size)
