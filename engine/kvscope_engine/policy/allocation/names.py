"""The allocation policies by name: what `--allocator` and the simulator choose from."""

from __future__ import annotations

from typing import Final

from kvscope_engine.policy.allocation.address_space import AddressSpace
from kvscope_engine.policy.allocation.protocol import AllocationPolicy, PagedAllocation
from kvscope_engine.policy.allocation.reservations import (
    ReservationRule,
    ReserveExactly,
    ReserveMaximum,
    ReservePowerOfTwo,
)
from kvscope_engine.policy.allocation.run_allocation import RunAllocation
from kvscope_engine.policy.allocation.virtual_allocation import NoMapper, PageMapper, VirtualAllocation
from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.fit import num_blocks_for
from kvscope_telemetry.errors import BadInput

ALLOCATORS: Final[tuple[str, ...]] = ("paged", "contiguous", "buddy", "oracle", "virtual")


def make_allocation(
    name: str,
    pool: BlockPool,
    *,
    max_model_len: int,
    space: AddressSpace | None = None,
    mapper: PageMapper | None = None,
) -> AllocationPolicy:
    """The policy `name` over `pool`, of which every block must be free; no other policy may use the pool.

    Raises BadInput for a name that does not exist, and for a pool that cannot serve the policy: the reserving
    ones share nothing, so prefix caching must be off, and `contiguous` needs a run of `max_model_len` tokens.
    `virtual` needs a `space`, whose rows `pool` has, and a `mapper` where there are bytes behind the blocks.
    """
    if name not in ALLOCATORS:
        raise BadInput(f"allocator={name!r} is not accepted: one of {', '.join(ALLOCATORS)}")
    if name == "paged":
        return PagedAllocation(pool)
    if pool.index is not None:
        raise BadInput(f"allocator={name!r} is not accepted with prefix caching: it needs prefix caching off")
    if name == "virtual":
        assert space is not None, "allocator 'virtual' has no address space"
        return VirtualAllocation(pool, space, mapper or NoMapper())
    allocation = RunAllocation(_rule(name, max_model_len), pool, max_model_len=max_model_len)
    if name == "contiguous" and max_model_len > allocation.max_request_tokens:
        raise BadInput(_too_long(pool, max_model_len, allocation.max_request_tokens))
    return allocation


def _rule(name: str, max_model_len: int) -> ReservationRule:
    if name == "contiguous":
        return ReserveMaximum(max_model_len)
    return ReservePowerOfTwo() if name == "buddy" else ReserveExactly()


def _too_long(pool: BlockPool, max_model_len: int, accepted: int) -> str:
    needed = num_blocks_for(max_model_len, pool.block_size)
    return (
        f"max_model_len={max_model_len} is not accepted with allocator='contiguous': {needed} blocks in a row, rounded"
        f" up to a power of two, are not in a pool of {pool.num_blocks}; at most {accepted} tokens are"
    )
