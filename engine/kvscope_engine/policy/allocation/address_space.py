"""Sizes of the policy `virtual`: how many blocks a page backs, how long a slot is, how much memory there is.

The cache is several tensors (one a layer), each `(num_rows, ...)` over reserved addresses. Memory comes in pages
of a fixed size, and in *groups* of them: as many of each tensor that the first n groups of a slot back the slot's
first `floor(n x group_blocks)` blocks in every tensor. `group_blocks` need not be whole: where a block is no whole
part of a page it lies across two, and is backed when both are there.

Arithmetic alone: knows neither who uses the memory nor where it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Final

from kvscope_engine.policy.fit import num_blocks_for
from kvscope_telemetry.errors import BadInput

MAX_ROWS: Final = 1 << 24
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """`num_slots` runs of `slot_blocks` rows each, and `num_groups` page groups to put behind them."""

    num_slots: int
    slot_blocks: int
    num_groups: int
    group_blocks: Fraction = Fraction(1)
    """At least 1."""
    group_pages: tuple[int, ...] = (1,)
    """Pages of a group, for each tensor."""

    @property
    def num_rows(self) -> int:
        """Rows of the ledger: every block that has an address."""
        return self.num_slots * self.slot_blocks

    @property
    def num_physical_blocks(self) -> int:
        """Blocks that the memory holds."""
        return self.num_backed(self.num_groups)

    def num_backed(self, num_groups: int) -> int:
        """Blocks that the first `num_groups` groups of a slot back, were the slot long enough."""
        return num_groups * self.group_blocks.numerator // self.group_blocks.denominator

    def num_groups_for(self, num_blocks: int) -> int:
        """Groups that back the first `num_blocks` blocks of a slot."""
        return -(-num_blocks * self.group_blocks.denominator // self.group_blocks.numerator)


def page_group(block_bytes: Sequence[int | Fraction], page_bytes: int) -> tuple[Fraction, tuple[int, ...]]:
    """Blocks that a group backs, at least 1, and its pages in each tensor, where a block takes `block_bytes`."""
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
    """The sizes for a pool that may take the memory of `num_blocks` blocks, `block_bytes` in each tensor.

    A slot holds `max_model_len` tokens, in whole pages of every tensor. There are no more slots than groups, as a
    request holds one at least. Raises BadInput when not one group fits into the memory, or addresses are too many.
    """
    group_blocks, pages = page_group(block_bytes, page_bytes)
    group_bytes = sum(pages) * page_bytes
    num_groups = num_blocks * sum(block_bytes) // group_bytes
    if not num_groups:
        raise BadInput(_too_small(num_blocks, sum(block_bytes), group_bytes, sum(pages)))
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
    """The pages of a tensor that come to be needed with these blocks, those of the slot's blocks before being there.

    A page that a block shares with the one before it is thus not among them.
    """
    start, stop = first_block * block_bytes, (first_block + num_blocks) * block_bytes
    return range(-(-start // page_bytes), -(-stop // page_bytes))


def _too_small(num_blocks: int, block_bytes: int, group_bytes: int, num_pages: int) -> str:
    return (
        f"a pool of {num_blocks} blocks ({num_blocks * block_bytes / MIB:.2f} MiB) is too small for"
        f" allocator='virtual': a request takes at least {num_pages} pages, {group_bytes / MIB:.2f} MiB in all"
    )
