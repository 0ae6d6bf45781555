"""Pages, groups and slots of the address space, compared with hand-computed numbers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples

from kvscope_engine.policy.allocation.address_space import AddressSpace, address_space, page_range
from kvscope_telemetry.errors import BadInput

MIB = 1 << 20


def space(*block_bytes: int, page_bytes: int = 32, **changes: Any) -> AddressSpace:
    sizes = {"num_blocks": 100, "block_size": 4, "max_model_len": 64, "max_num_seqs": 8} | changes
    return address_space(block_bytes=block_bytes, page_bytes=page_bytes, **sizes)


def test_page_groups_are_right_if_blocks_fit_pages_exactly() -> None:
    """A page has 4 blocks of 8 bytes in each of two layers: 1,600 bytes are 25 groups of 64."""
    found = space(8, 8)
    assert found == AddressSpace(8, 16, 25, Fraction(4), (1, 1))
    assert (found.num_rows, found.num_physical_blocks) == (128, 100)
    assert [found.num_groups_for(count) for count in (0, 1, 4, 5, 16)] == [0, 1, 1, 2, 4]


def test_page_groups_are_right_if_blocks_span_pages() -> None:
    """Blocks of 24 bytes in pages of 32: n pages back 1, 2, 4, 5, 6, 8 blocks, and a page border is a block border
    every 4 blocks.
    """
    found = space(24, max_model_len=17)
    assert (found.group_blocks, found.slot_blocks, found.num_groups) == (Fraction(4, 3), 8, 75)
    assert [found.num_backed(count) for count in range(7)] == [0, 1, 2, 4, 5, 6, 8]
    assert [found.num_groups_for(count) for count in range(1, 7)] == [1, 2, 3, 3, 4, 5]


def test_page_groups_are_right_if_blocks_are_larger_than_a_page() -> None:
    """80 bytes are two and a half pages: three for the first block, which also back a fifth of the second."""
    found = space(80)
    assert (found.group_pages, found.group_blocks, found.slot_blocks) == ((3,), Fraction(6, 5), 16)
    assert [found.num_backed(count) for count in range(6)] == [0, 1, 2, 3, 4, 6]


def test_page_group_holds_as_many_blocks_as_a_page_of_the_smaller_layer() -> None:
    """A group has as many blocks as a page of the smaller layer."""
    found = space(8, 32)
    assert (found.group_pages, found.group_blocks) == ((1, 4), Fraction(4))


def test_llama_3_8b_page_holds_512_tokens() -> None:
    """2 x 8 heads x 128 x 2 bytes per token and layer. vAttention, which separates keys and values, has 1,024."""
    sizes = {"page_bytes": 2 * MIB, "num_blocks": 26_625, "block_size": 16, "max_model_len": 8192}
    assert space(*[4096 * 16] * 32, **sizes).group_blocks * 16 == 512
    assert space(*[2048 * 16] * 64, **sizes).group_blocks * 16 == 1024


def test_virtual_address_space_has_at_most_as_many_slots_as_page_groups() -> None:
    assert space(8, num_blocks=12).num_slots == 3


def test_pool_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(BadInput, match=r"a pool of 31 blocks \(1.94 MiB\) is too small .* 2 pages, 4.00 MiB in all"):
        space(MIB // 32, MIB // 32, page_bytes=2 * MIB, num_blocks=31)


def test_address_space_beyond_the_ledger_is_refused() -> None:
    with pytest.raises(BadInput, match=r"max_model_len=1000000000 is not accepted .* 8 slots of 250000000 blocks"):
        space(8, max_model_len=10**9)


@settings(max_examples=examples(200), deadline=None)
@given(
    block_bytes=st.lists(st.integers(1, 12).map(lambda count: 8 * count), min_size=1, max_size=3),
    num_blocks=st.integers(40, 90),
    steps=st.lists(st.integers(1, 4), max_size=8),
)
def test_page_groups_cover_the_blocks_of_a_slot_without_extra_pages(
    block_bytes: list[int], num_blocks: int, steps: list[int]
) -> None:
    """At any size of a slot, its blocks lie in its pages, which are at most the pages of its groups."""
    found = space(*block_bytes, num_blocks=num_blocks, max_model_len=400)
    assert found.num_groups * sum(found.group_pages) * 32 <= num_blocks * sum(block_bytes)
    assert found.group_blocks >= 1
    pages: list[set[int]] = [set() for _ in block_bytes]
    first, groups = found.slot_blocks, 0  # the second slot
    for step in steps:
        before, groups = found.num_backed(groups), groups + step
        after = min(found.num_backed(groups), found.slot_blocks)
        if after <= before:
            return
        for index, size in enumerate(block_bytes):
            fresh = set(page_range(first + before, after - before, size, 32))
            assert not fresh & pages[index]
            pages[index] |= fresh
            assert pages[index] == {byte // 32 for byte in range(first * size, (first + after) * size)}
            assert len(pages[index]) <= groups * found.group_pages[index]
        assert found.num_groups_for(after) <= groups
