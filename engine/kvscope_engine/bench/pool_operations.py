"""How fast the block pool alone is: the life of a request's blocks, again and again."""

from __future__ import annotations

import time
from typing import Final

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.prefixes.prefix_index import Prefix

BLOCK_SIZE: Final = 16
PROMPT_BLOCKS: Final = 64
OUTPUT_BLOCKS: Final = 16


def pool_operations_per_s(num_blocks: int, num_lives: int) -> float:
    """Block operations a second of one core; one is a block in a call of allocate, write, seal, release or hit.

    A life: 64 blocks allocated and written in one call each, sealed one by one (digests ready: hashing text is not
    the pool's), 16 allocated, written and sealed one at a time, all released in one call, the prompt's hit and
    released again. So 64 x 6 + 16 x 4 operations, and evictions once the pool is full of cached blocks.
    """
    pool = BlockPool(num_blocks, BLOCK_SIZE, salt=b"bench")
    elapsed_ns = 0
    for number in range(1, num_lives + 1):
        names = [
            number.to_bytes(16, "big") + place.to_bytes(16, "big") for place in range(PROMPT_BLOCKS + OUTPUT_BLOCKS)
        ]
        prefixes = [Prefix(name, BLOCK_SIZE * place, bytes(4 * BLOCK_SIZE)) for place, name in enumerate(names)]
        started = time.thread_time_ns()
        _live(pool, number, prefixes)
        elapsed_ns += time.thread_time_ns() - started
        pool.take_changed()
    return num_lives * (6 * PROMPT_BLOCKS + 4 * OUTPUT_BLOCKS) / (elapsed_ns / 1e9)


def _live(pool: BlockPool, number: int, prefixes: list[Prefix]) -> None:
    blocks = pool.allocate(PROMPT_BLOCKS, number)
    pool.write(blocks, [BLOCK_SIZE] * PROMPT_BLOCKS, [number] * PROMPT_BLOCKS, number)
    for block, prefix in zip(blocks, prefixes, strict=False):
        pool.seal(block, prefix)
    for prefix in prefixes[PROMPT_BLOCKS:]:
        (block,) = pool.allocate(1, number)
        pool.write([block], [BLOCK_SIZE], [number], number)
        pool.seal(block, prefix)
        blocks.append(block)
    pool.release(blocks, number)
    pool.hit(blocks[:PROMPT_BLOCKS], number)
    pool.release(blocks[:PROMPT_BLOCKS], number)
