"""Sizes of the allocation policy `virtual`: blocks per page group, length of a slot, and number of page groups.

The cache is several tensors (one per layer), each `(num_rows, ...)` over reserved addresses. Memory is mapped in pages
of a fixed size, and in *groups* of pages. A group has as many pages of each tensor as are needed so that the first n
groups of a slot back the slot's first `floor(n x group_blocks)` blocks in every tensor. `group_blocks` need not be an
integer: if the page size is not a multiple of the block size, a block may span two pages, and is backed if both are
mapped.

Arithmetic only: independent of how the memory is used and mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Final

from kvscope_engine.policy.block_needs import num_blocks_for
from kvscope_telemetry.errors import BadInput

MAX_ROWS: Final = 1 << 24
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """Sizes of an address space with `num_slots` slots of `slot_blocks` consecutive block addresses each.

    `num_groups` page groups of memory can be mapped behind the addresses.
    """

    num_slots: int
    slot_blocks: int
    num_groups: int
    group_blocks: Fraction = Fraction(1)
    """Number of blocks that a page group backs, at least 1."""
    group_pages: tuple[int, ...] = (1,)
    """Number of pages that a page group has in each tensor."""

    @property
    def num_rows(self) -> int:
        """Number of ledger rows: one per block address, whether memory is mapped there or not."""
        return self.num_slots * self.slot_blocks

    @property
    def num_physical_blocks(self) -> int:
        return self.num_backed(self.num_groups)

    def num_backed(self, num_groups: int) -> int:
        """Return the number of blocks that the first `num_groups` groups of a slot back if the slot is long enough."""
        return num_groups * self.group_blocks.numerator // self.group_blocks.denominator

    def num_groups_for(self, num_blocks: int) -> int:
        return -(-num_blocks * self.group_blocks.denominator // self.group_blocks.numerator)


def page_group(block_bytes: Sequence[int | Fraction], page_bytes: int) -> tuple[Fraction, tuple[int, ...]]:
    """Return the number of blocks that a page group backs, at least 1, and its number of pages in each tensor.

    `block_bytes` is the size of a block in each tensor.
    """
    whole = max(Fraction(page_bytes, min(block_bytes)), Fraction(1))
    pages = tuple(-(-size * whole // page_bytes) for size in block_bytes)
    return min(Fraction(count * page_bytes, size) for count, size in zip(pages, block_bytes, strict=True)), pages


def address_space(
    *,
    block_bytes: Sequence[int],
    page_bytes: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
) -> AddressSpace:
    """Return the sizes for a pool whose memory is that of `num_blocks` blocks with `block_bytes` bytes in each tensor.

    A slot has `max_model_len` tokens, rounded up to whole pages of every tensor. There are no more slots than page
    groups, since each request holds at least one group.

    Raises:
        BadInput: The memory is too small for one group, or there are more than `MAX_ROWS` block addresses.
    """
    group_blocks, pages = page_group(block_bytes, page_bytes)
    group_bytes = sum(pages) * page_bytes
    num_groups = num_blocks * sum(block_bytes) // group_bytes
    if not num_groups:
        raise BadInput(_too_small_message(num_blocks, sum(block_bytes), group_bytes, sum(pages)))
    alignment = lcm(*(page_bytes // gcd(page_bytes, size) for size in block_bytes))
    slot_blocks = -(-num_blocks_for(max_model_len, block_size) // alignment) * alignment
    space = AddressSpace(min(max_num_seqs, num_groups), slot_blocks, num_groups, group_blocks, pages)
    if space.num_rows > MAX_ROWS:
        raise BadInput(
            f"max_model_len={max_model_len} is not accepted with allocator='virtual': {space.num_slots} slots of"
            f" {slot_blocks} blocks are more than {MAX_ROWS}; give a smaller --max-model-len or --max-num-seqs"
        )
    return space


def page_range(first_block: int, num_blocks: int, block_bytes: int, page_bytes: int) -> range:
    """Return the pages of a tensor to map for `num_blocks` blocks, if the slot's earlier blocks are backed already.

    A page shared with the previous block is therefore not included.
    """
    start, stop = first_block * block_bytes, (first_block + num_blocks) * block_bytes
    return range(-(-start // page_bytes), -(-stop // page_bytes))


def _too_small_message(num_blocks: int, block_bytes: int, group_bytes: int, num_pages: int) -> str:
    return (
        f"a pool of {num_blocks} blocks ({num_blocks * block_bytes / MIB:.2f} MiB) is too small for"
        f" allocator='virtual': a request takes at least {num_pages} pages, {group_bytes / MIB:.2f} MiB in all"
    )
