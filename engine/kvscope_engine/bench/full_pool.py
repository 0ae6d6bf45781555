"""A pool without free blocks, for `bench scheduler`: all that no request holds is cached, and so is host memory."""

from __future__ import annotations

from itertools import count
from typing import Final

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.prefixes.prefix_index import Prefix

OWNER: Final = (1 << 31) - 1
"""A request that never was."""
TEXT_BLOCKS: Final = 64
"""Of one text, each block after another: its first one is one of many beginnings."""


def fill_pool(pool: BlockPool) -> None:
    """Every free block becomes one of a text that nobody holds; so again until host memory is full of such texts.

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
        pool.seal(block, _prefix(next(names), size))
    pool.release(blocks, pool.step)


def _prefix(name: int, size: int) -> Prefix:
    """The `name`-th block of all texts: it follows the one before it, unless it begins a text."""
    place = name % TEXT_BLOCKS
    return Prefix(_digest(name), place * size, bytes(4 * size), _digest(name - 1) if place else b"")


def _digest(name: int) -> bytes:
    return name.to_bytes(32, "big")
