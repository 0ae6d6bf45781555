"""Allocation policies by name, and refused configurations."""

from __future__ import annotations

import pytest

from kvscope_engine.policy.allocation.address_space import AddressSpace
from kvscope_engine.policy.allocation.allocator_names import ALLOCATORS
from kvscope_engine.policy.allocation.allocators import make_allocation, make_pool
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_telemetry.errors import BadInput

RESERVING = tuple(name for name in ALLOCATORS if name != "paged")
SPACE = AddressSpace(num_slots=1, slot_blocks=8, num_groups=8)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_each_allocator_name_creates_its_policy(name: str) -> None:
    allocation = make_allocation(name, _pool(name), max_model_len=32)
    assert allocation.name == name
    assert allocation.reserves == (name != "paged")
    assert allocation.max_request_tokens == 32


def test_paged_policy_has_no_contiguity_limit() -> None:
    assert make_allocation("paged", make_pool("paged", 9, 4), max_model_len=1 << 20).max_request_tokens == 36


@pytest.mark.parametrize("name", ["", "Paged", "Virtual", "slab"])
def test_unknown_policy_is_refused(name: str) -> None:
    with pytest.raises(
        BadInput, match=f"allocator='{name}' is not accepted: must be one of paged, contiguous, buddy, virtual, oracle"
    ):
        make_pool(name, 8, 4)


@pytest.mark.parametrize("name", RESERVING)
def test_reserving_policy_refuses_prefix_caching(name: str) -> None:
    with pytest.raises(BadInput, match=f"allocator='{name}' is not accepted with prefix caching"):
        make_pool(name, 8, 4, space=SPACE)


def test_contiguous_refuses_a_model_length_beyond_the_longest_run() -> None:
    """12 blocks are one run of 8 and one of 4."""
    with pytest.raises(BadInput, match=r"max_model_len=33 .* run of 9 blocks.* pool of 12.*; at most 32 tokens"):
        make_allocation("contiguous", _pool("contiguous", 12), max_model_len=33)
    make_allocation("contiguous", _pool("contiguous", 12), max_model_len=32)


@pytest.mark.parametrize("name", ["buddy", "oracle"])
def test_longest_run_limits_the_length_of_a_request(name: str) -> None:
    assert make_allocation(name, _pool(name, 12), max_model_len=1000).max_request_tokens == 32


def test_allocator_refuses_a_pool_that_already_has_allocated_blocks() -> None:
    for name in ("buddy", "paged"):
        pool = _pool(name)
        pool.allocate(1, 1)
        with pytest.raises(AssertionError, match="1 blocks of the pool are in use"):
            make_allocation(name, pool, max_model_len=32)


def _pool(name: str, num_blocks: int = 8) -> BlockPool:
    return make_pool(name, num_blocks, 4, prefix_caching=False, space=SPACE)
