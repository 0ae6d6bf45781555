"""A pool without free blocks, for `bench scheduler`: all that no request holds is cached, and so is host memory."""

from __future__ import annotations

from itertools import count

from kvscope_engine.policy.block_pool import BlockPool
from kvscope_engine.policy.prefix_index import Prefix

OWNER = (1 << 31) - 1
"""A request that never was."""


def fill_pool(pool: BlockPool) -> None:
    """Every free block gets a text of its own and is let go of; so again until host memory is full of such texts.

    From then on each block that is allocated is evicted before, and sinks where there are lower tiers.
    """
    names = count(1)
    _cache(pool, pool.num_free, names)
    assert pool.num_cached, "requests hold every block of the pool"
    host = slice(pool.num_blocks, pool.num_blocks + pool.num_host)
    while missing := int((pool.ledger.hash[host] == 0).sum()):
        _cache(pool, min(missing, pool.num_cached), names)


def _cache(pool: BlockPool, num_blocks: int, names: count[int]) -> None:
    blocks, size = pool.allocate(num_blocks, OWNER), pool.block_size
    pool.write(blocks, [size] * num_blocks, [OWNER] * num_blocks, pool.step)
    for block in blocks:
        pool.seal(block, Prefix(next(names).to_bytes(32, "big"), 0, bytes(4 * size)))
    pool.release(blocks, pool.step)
