"""Policies by name, and what is refused."""

from __future__ import annotations

import pytest

from kvscope_engine.policy.allocation.address_space import AddressSpace
from kvscope_engine.policy.allocation.names import ALLOCATORS, make_allocation
from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_telemetry.errors import BadInput

RESERVING = tuple(name for name in ALLOCATORS if name != "paged")
SPACE = AddressSpace(num_slots=1, slot_blocks=8, num_groups=8)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_each_name_makes_its_policy(name: str) -> None:
    allocation = make_allocation(name, BlockPool(8, 4, prefix_caching=False), max_model_len=32, space=SPACE)
    assert allocation.name == name
    assert allocation.reserves == (name != "paged")
    assert allocation.max_request_tokens == 32


def test_only_paged_shares_and_needs_no_run() -> None:
    assert make_allocation("paged", BlockPool(9, 4), max_model_len=1 << 20).max_request_tokens == 36


@pytest.mark.parametrize("name", ["", "Paged", "Virtual", "slab"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(
        BadInput, match=f"allocator='{name}' is not accepted: one of paged, contiguous, buddy, oracle, virtual"
    ):
        make_allocation(name, BlockPool(8, 4, prefix_caching=False), max_model_len=32)


@pytest.mark.parametrize("name", RESERVING)
def test_reserving_policies_refuse_prefix_caching(name: str) -> None:
    with pytest.raises(BadInput, match=f"allocator='{name}' is not accepted with prefix caching"):
        make_allocation(name, BlockPool(8, 4), max_model_len=32)


def test_contiguous_refuses_a_model_length_that_no_run_holds() -> None:
    """12 blocks are a run of 8 and one of 4."""
    with pytest.raises(BadInput, match=r"max_model_len=33 .* 9 blocks in a row.* pool of 12; at most 32 tokens are"):
        make_allocation("contiguous", BlockPool(12, 4, prefix_caching=False), max_model_len=33)
    make_allocation("contiguous", BlockPool(12, 4, prefix_caching=False), max_model_len=32)


@pytest.mark.parametrize("name", ["buddy", "oracle"])
def test_others_bound_a_request_by_the_longest_run(name: str) -> None:
    pool = BlockPool(12, 4, prefix_caching=False)
    assert make_allocation(name, pool, max_model_len=1000).max_request_tokens == 32


def test_a_pool_in_use_is_an_error() -> None:
    pool = BlockPool(8, 4, prefix_caching=False)
    pool.allocate(1, 1)
    for name in ("buddy", "virtual"):
        with pytest.raises(AssertionError, match="1 blocks of the pool are in use"):
            make_allocation(name, pool, max_model_len=32, space=SPACE)
