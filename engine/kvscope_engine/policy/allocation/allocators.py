"""Creates an allocation policy and its pool by name."""

from __future__ import annotations

from collections.abc import Mapping

from kvscope_engine.policy.allocation.address_space import AddressSpace
from kvscope_engine.policy.allocation.allocation_policy import AllocationPolicy, PagedAllocation
from kvscope_engine.policy.allocation.allocator_names import ALLOCATORS
from kvscope_engine.policy.allocation.mapped_pool import MappedPool
from kvscope_engine.policy.allocation.reservations import (
    ReservationRule,
    ReserveExactly,
    ReserveMaximum,
    ReservePowerOfTwo,
)
from kvscope_engine.policy.allocation.run_allocation import RunAllocation
from kvscope_engine.policy.allocation.run_pool import RunPool
from kvscope_engine.policy.allocation.virtual_allocation import NoMapper, PageMapper, VirtualAllocation
from kvscope_engine.policy.block_needs import num_blocks_for
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_groups import ONE_GROUP, GroupRule
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import Tier


def make_pool(
    name: str,
    num_blocks: int,
    block_size: int,
    *,
    prefix_caching: bool = True,
    salt: bytes | None = None,
    other_tiers: Mapping[Tier, int] | None = None,
    space: AddressSpace | None = None,
    groups: tuple[GroupRule, ...] = ONE_GROUP,
) -> BlockPool:
    """Create the pool for the policy `name`, with every block free.

    Only `paged` has a prefix cache, slots in lower tiers and KV groups. `virtual` needs a `space`, whose addresses are
    the pool's blocks; `num_blocks` is then ignored. For `other_tiers` see `BlockPool`.

    Raises:
        BadInput: The name is unknown, or prefix caching is requested with a policy that shares no blocks.
    """
    if name not in ALLOCATORS:
        raise BadInput(f"allocator={name!r} is not accepted: must be one of {', '.join(ALLOCATORS)}")
    if name == "paged":
        return BlockPool(
            num_blocks,
            block_size,
            prefix_caching=prefix_caching,
            salt=salt,
            other_tiers=other_tiers,
            groups=groups,
        )
    assert groups == ONE_GROUP, f"allocator {name!r} has one KV group"
    if prefix_caching:
        raise BadInput(f"allocator={name!r} is not accepted with prefix caching: it needs prefix caching off")
    tiers = other_tiers or {}
    assert not any(count for tier, count in tiers.items() if tier is not Tier.STATES), (
        f"allocator {name!r} has no lower tiers"
    )
    num_states = tiers.get(Tier.STATES, 0)
    if name == "virtual":
        assert space is not None, "allocator 'virtual' has no address space"
        return MappedPool(space, block_size, num_states=num_states)
    return RunPool(num_blocks, block_size, num_states=num_states)


def make_allocation(
    name: str, pool: BlockPool, *, max_model_len: int, mapper: PageMapper | None = None
) -> AllocationPolicy:
    """Create the policy `name` over a pool that `make_pool` made for it. No other policy may use the pool.

    `virtual` needs a `mapper` if the blocks have real memory.

    Raises:
        BadInput: The pool is too small for `contiguous`, which needs a run of `max_model_len` tokens.
    """
    assert not pool.num_active, f"{pool.num_active} blocks of the pool are in use"
    if isinstance(pool, MappedPool):
        return VirtualAllocation(pool, mapper or NoMapper())
    if not isinstance(pool, RunPool):
        return PagedAllocation(pool)
    allocation = RunAllocation(_reservation_rule(name, max_model_len), pool, max_model_len=max_model_len)
    if name == "contiguous" and max_model_len > allocation.max_request_tokens:
        raise BadInput(_too_long_message(pool, max_model_len, allocation.max_request_tokens))
    return allocation


def fitting_model_len(name: str, num_blocks: int, block_size: int, max_model_len: int) -> int:
    """Return the largest maximum length of a request, up to `max_model_len` tokens, that the policy `name` can serve
    with `num_blocks` blocks.

    Only `contiguous` may return less than `max_model_len`. It reserves the maximum length for each request, which must
    therefore fit in the pool's longest run.
    """
    if name != "contiguous":
        return max_model_len
    return min(max_model_len, RunPool(num_blocks, block_size).longest_run * block_size)


def _reservation_rule(name: str, max_model_len: int) -> ReservationRule:
    if name == "contiguous":
        return ReserveMaximum(max_model_len)
    return ReservePowerOfTwo() if name == "buddy" else ReserveExactly()


def _too_long_message(pool: BlockPool, max_model_len: int, accepted: int) -> str:
    needed = num_blocks_for(max_model_len, pool.block_size)
    return (
        f"max_model_len={max_model_len} is not accepted with allocator='contiguous': it needs a run of {needed} "
        f"blocks, rounded up to a power of two, which a pool of {pool.num_blocks} does not have; at most {accepted} "
        f"tokens are accepted (--max-model-len {accepted})"
    )
