"""Computes the offset of each tensor, and the pages of its blocks, in the reserved address range. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvscope_engine.policy.allocation.address_space import AddressSpace, page_range


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Layout of consecutive tensors that start on page boundaries: tensor i has `space.num_rows` blocks of
    `block_bytes[i]` bytes.
    """

    block_bytes: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offset of each tensor in bytes from the start of the address range."""
    num_bytes: int
    page_bytes: int
    num_pages: int
    """Maximum number of pages mapped at the same time."""

    @classmethod
    def of(cls, block_bytes: Sequence[int], space: AddressSpace, page_bytes: int) -> PageLayout:
        """Compute the layout. `space` must have been computed for these sizes."""
        sizes = [space.num_rows * size for size in block_bytes]
        assert not any(space.slot_blocks * size % page_bytes for size in block_bytes), "a slot is no whole pages"
        offsets = (0, *accumulate(sizes))
        return cls(tuple(block_bytes), offsets[:-1], offsets[-1], page_bytes, space.num_groups * sum(space.group_pages))

    def spans(self, first_block: int, num_blocks: int) -> Iterator[range]:
        """Yield the pages of these blocks in each tensor, as page numbers from the start of the address range. Empty
        ranges are omitted.
        """
        for offset, size in zip(self.offsets, self.block_bytes, strict=True):
            pages = page_range(first_block, num_blocks, size, self.page_bytes)
            if pages:
                start = offset // self.page_bytes
                yield range(start + pages.start, start + pages.stop)
