"""What a step that was run leaves behind: tokens counted as computed, slots filled, full blocks sealed."""

from __future__ import annotations

from kvscope_engine.policy.block_pool import BlockPool
from kvscope_engine.policy.plan import Scheduled, StepPlan
from kvscope_engine.policy.request_prefixes import seal_blocks
from kvscope_telemetry.requests import RequestState


def write_down(plan: StepPlan, pool: BlockPool, step: int) -> int:
    """Advance every request of the plan that still runs; returns how many prompt tokens were computed."""
    size = pool.block_size
    blocks: list[int] = []
    filled: list[int] = []
    owners: list[int] = []
    prompt_tokens = 0
    for item in plan.scheduled:
        request = item.request
        if request.state is not RequestState.RUNNING:
            continue
        start, end = item.start, item.start + item.num_tokens
        request.num_computed_tokens = end
        first, stop = start // size, -(-end // size)
        blocks += request.block_table[first:stop]
        filled += [size] * (stop - first - 1)
        filled.append(end - (stop - 1) * size)
        owners += [request.number] * (stop - first)
        prompt_tokens += _num_prompt_tokens(item)
        if end // size > first:
            seal_blocks(pool, request, first, end // size)
    pool.write(blocks, filled, owners, step)
    return prompt_tokens


def _num_prompt_tokens(item: Scheduled) -> int:
    """How many of the item's tokens are of the prompt, not of an output computed again."""
    left = item.request.num_prompt_tokens - item.start
    return min(item.num_tokens, left) if left > 0 else 0
