"""Updates requests and block pool after a step: counts tokens as computed, records filled slots, and seals full
blocks.
"""

from __future__ import annotations

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.scheduling.request_prefixes import seal_blocks
from kvscope_engine.policy.step_plan import StepPlan
from kvscope_telemetry.messages.request_state import RequestState


def commit_plan(plan: StepPlan, pool: BlockPool, step: int) -> int:
    """Record the plan's tokens as computed for every request that still runs.

    Returns the number of recomputed tokens, whose KV an earlier preemption had dropped.
    """
    blocks: list[int] = []
    filled: list[int] = []
    owners: list[int] = []
    recomputed, size = 0, pool.block_size
    for request, start, num_tokens, _, _ in plan.scheduled:
        if request.state is not RequestState.RUNNING:
            continue
        end, owner = start + num_tokens, request.number
        request.num_computed_tokens = end
        if start < request.num_lost_tokens:
            recomputed += min(num_tokens, request.num_lost_tokens - start)
        first, stop = start // size, -(-end // size)
        for table in request.block_tables:
            if stop - first > 1:
                blocks += table[first : stop - 1]
                filled += [size] * (stop - 1 - first)
                owners += [owner] * (stop - 1 - first)
            blocks.append(table[stop - 1])
            filled.append(end - (stop - 1) * size)
            owners.append(owner)
        if end // size > first:
            seal_blocks(pool, request, first, end // size)
    pool.record_write(blocks, filled, owners, step)
    return recomputed
