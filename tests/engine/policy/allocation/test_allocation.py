"""Paged allocation: any block for anybody."""

from __future__ import annotations

from kvscope_engine.policy.allocation.allocation_policy import AllocationPolicy, PagedAllocation
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.sampling_params import ResolvedSampling


def test_paged_takes_from_the_pool_and_gives_back() -> None:
    pool = BlockPool(4, 2)
    policy: AllocationPolicy = PagedAllocation(pool)
    request = Request(9, "r9", [1], ResolvedSampling(), 1, 0)
    assert policy.name == "paged"
    assert policy.num_available(request) == 4
    request.block_table.extend(policy.allocate(request, 3))
    assert policy.num_available(request) == 1
    assert pool.ledger.owner[request.block_table].tolist() == [9, 9, 9]
    policy.release(request, 5)
    assert policy.num_available(request) == 4
    assert pool.ledger.last_used_step.tolist() == [5, 5, 5, 0]
