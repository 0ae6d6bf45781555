"""The allocators and memory layouts that a what-if comparison covers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from kvscope_engine.policy.allocation.address_space import page_group
from kvscope_engine.simulator.what_if.layouts import GroupedMemory, PoolLayout
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.what_if import EXPANDED, MAX_SLOTS, NOT_FREED, Memory, UnsupportedScenario

PAGED_BLOCK_SIZES: Final = (8, 16, 32, 64, 128)
VIRTUAL: Final = "virtual"
_MAX_BLOCK_SIZE: Final = (1 << 16) - 1  # the ledger counts a block's filled slots in 16 bits


@dataclass(frozen=True, slots=True)
class Candidate:
    """An allocator to be compared, for a memory that is divided into `pools`, with blocks of `block_size` tokens."""

    allocator: str
    block_size: int
    pools: tuple[PoolLayout, ...]
    scenario: str = ""
    """Scenario in which the engine is changed (apart from the allocator): `NOT_FREED`, `EXPANDED`, or "" for none."""

    @property
    def allocator_name(self) -> str:
        """Name of the allocator for `make_allocation`.

        `virtual` is simulated as `paged` with blocks as large as a page group, because any physical page can be mapped
        at any address.
        """
        return "paged" if self.allocator == VIRTUAL else self.allocator

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the first pool."""
        return self.pools[0].num_blocks


def candidates(memory: Memory) -> list[Candidate]:
    """Return all candidates for `memory`: what-if scenarios for its KV groups, allocators that reserve memory ahead,
    and block sizes of `paged`.

    Raises BadInput for invalid KV groups.
    """
    groups, own = GroupedMemory(memory), memory.block_size
    result = []
    if groups.has_windows and not groups.why_not_without_freeing:
        result.append(Candidate("paged", own, groups.without_freeing(own), NOT_FREED))
    if groups.holds_latents and not groups.why_not_expanded:
        result.append(Candidate("paged", own, groups.expanded(), EXPANDED))
    if groups.has_tokens and not groups.why_not_without_freeing:
        if memory.max_model_len:
            result += [Candidate(name, own, groups.without_freeing(own)) for name in ("contiguous", "buddy")]
        if memory.block_bytes and groups.num_layers and memory.page_bytes:
            result.append(_virtual(memory, groups))
    sizes = sorted({*PAGED_BLOCK_SIZES, own} if memory.allocator == "paged" else PAGED_BLOCK_SIZES)
    for size in sizes if groups.has_tokens else [own]:
        result.append(Candidate("paged", size, groups.by_group(size)))
    return result


def unanswerable_questions(memory: Memory) -> list[UnsupportedScenario]:
    """Return the scenarios that cannot be simulated because information is missing, with the reason."""
    groups, result = GroupedMemory(memory), []
    if groups.has_windows and (why := groups.why_not_without_freeing):
        result.append(UnsupportedScenario(NOT_FREED, why))
    if groups.holds_latents and (why := groups.why_not_expanded):
        result.append(UnsupportedScenario(EXPANDED, why))
    return result


def check_candidate(candidate: Candidate) -> None:
    """Raise BadInput if not even one block fits in the memory, or if the memory or a block has too many slots
    to be compared.
    """
    for pool in candidate.pools:
        if not pool.num_blocks:
            raise BadInput(f"the memory is smaller than one block of {pool.block_size} slots")
        if pool.block_size > _MAX_BLOCK_SIZE:
            raise BadInput(f"{pool.block_size} slots a block are too many: at most {_MAX_BLOCK_SIZE} are counted")
        if pool.num_slots > MAX_SLOTS:
            raise BadInput(f"a memory of {pool.num_slots} slots is too large to compare: at most {MAX_SLOTS}")


def _virtual(memory: Memory, groups: GroupedMemory) -> Candidate:
    """Return the candidate `virtual`, whose block is a page group of `policy/allocation/address_space`.

    A page group is one page in each layer's tensor, in which K and V are interleaved. If a block of the engine is
    larger than a page, the group has as many pages per layer as that block takes.
    """
    own = memory.block_size
    first, *others = groups.without_freeing(own)
    block_bytes = Fraction(round(first.slot_bytes * own))
    group_blocks, (num_pages,) = page_group([block_bytes / groups.num_layers], memory.page_bytes)
    tokens = int(group_blocks * own)
    group_bytes = num_pages * memory.page_bytes * groups.num_layers
    num_groups = int(first.num_blocks * block_bytes // group_bytes)
    pool, *_ = groups.without_freeing(tokens)
    return Candidate(VIRTUAL, tokens, (replace(pool, max_blocks=num_groups), *others))
