"""The table of compared policies; a line adds a policy."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from kvscope_engine.policy.allocation.address_space import page_group
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.what_if import Memory

PAGED_BLOCK_SIZES: Final = (8, 16, 32, 64, 128)
VIRTUAL: Final = "virtual"
_MAX_BLOCK_SIZE: Final = (1 << 16) - 1  # the ledger counts a block's filled slots in 16 bits


@dataclass(frozen=True, slots=True)
class Candidate:
    """One policy over a memory cut into `num_blocks` blocks of `block_size` slots."""

    allocator: str
    block_size: int
    num_blocks: int

    @property
    def made_as(self) -> str:
        """The name under which `make_allocation` knows how blocks are chosen.

        Any physical page can be mapped at any address: to the memory, `virtual` is paging by what a page holds.
        """
        return "paged" if self.allocator == VIRTUAL else self.allocator


def candidates(memory: Memory) -> list[Candidate]:
    """All that can be worked out for `memory`: reserving ones first, then paged ones by size of block."""
    own = memory.block_size
    sizes = sorted({*PAGED_BLOCK_SIZES, own} if memory.allocator == "paged" else PAGED_BLOCK_SIZES)
    runs = [_of(memory, name, own) for name in ("contiguous", "buddy")] if memory.max_model_len else []
    pages = [_virtual(memory)] if memory.block_bytes and memory.num_layers and memory.page_bytes else []
    return [*runs, *pages, *(_of(memory, "paged", size) for size in sizes)]


def check(candidate: Candidate) -> None:
    """Raise BadInput when not one block fits into the memory, or a block has too many slots to be counted."""
    if not candidate.num_blocks:
        raise BadInput(f"the memory is smaller than one block of {candidate.block_size} slots")
    if candidate.block_size > _MAX_BLOCK_SIZE:
        raise BadInput(f"{candidate.block_size} slots a block are too many: at most {_MAX_BLOCK_SIZE} are counted")


def _of(memory: Memory, allocator: str, block_size: int) -> Candidate:
    return Candidate(allocator, block_size, memory.num_slots // block_size)


def _virtual(memory: Memory) -> Candidate:
    """A block is what one page in the tensor of each layer backs, K and V side by side in it, or as many pages as a
    block of the engine takes where that is more: the groups of `policy/address_space`."""
    in_layer = Fraction(memory.block_bytes, memory.num_layers)
    group_blocks, (num_pages,) = page_group([in_layer], memory.page_bytes)
    tokens = int(group_blocks * memory.block_size)
    group_bytes = num_pages * memory.page_bytes * memory.num_layers
    num_groups = memory.num_blocks * memory.block_bytes // group_bytes
    return Candidate(VIRTUAL, tokens, min(num_groups, memory.num_slots // tokens))
