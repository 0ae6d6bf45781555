"""Simulates vLLM's prefix cache for prompts that run one after another, in the order of the file.

Each prompt holds all of its blocks while it runs. Then they are freed from the last to the first. As in vLLM, blocks
without a hash (the partial last one) are allocated again first, and full ones are evicted in the order in which they
were freed. A prompt whose tokens are all cached computes its last token again, and with it a block whose content is
cached already, so that the cache may contain a text twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from kvscope_engine.analysis.prompt_log import Hashes


@dataclass(frozen=True, slots=True)
class CacheRun:
    num_hit_tokens: int
    num_too_long: int
    """Number of prompts that do not fit into the pool even alone. They are left out, without hits."""


class SimulatedCache:
    """A pool of `num_blocks` blocks that can be allocated (vLLM's null block comes in addition)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._num_empty = num_blocks
        self._evictable: OrderedDict[int, int] = OrderedDict()  # cached block -> its hash; the first is evicted next
        self._cached: dict[int, list[int]] = {}  # hash -> cached blocks, the oldest first
        self._new_blocks = count()

    def run(self, hashes: list[int], num_tokens: int) -> int | None:
        """Run a prompt with these hashes of its full blocks. Returns the number of cached tokens that it found, or None
        if it does not fit.
        """
        size, cached, evictable = self._block_size, self._cached, self._evictable
        num_needed = -(-num_tokens // size)
        if num_needed > self.num_blocks:
            return None
        held: list[int] = []
        for hash_ in hashes[: (num_tokens - 1) // size]:
            blocks = cached.get(hash_)
            if blocks is None:
                break
            del evictable[blocks[0]]
            held.append(blocks[0])
        num_hits = len(held)
        for _ in range(num_needed - num_hits - self._num_empty):
            block, hash_ = evictable.popitem(last=False)
            blocks = cached[hash_]
            blocks.remove(block)
            if not blocks:
                del cached[hash_]
        num_new_empty = max(0, self._num_empty - (num_needed - num_hits))
        for hash_ in hashes[num_hits:]:
            block = next(self._new_blocks)
            held.append(block)
            cached.setdefault(hash_, []).append(block)
        self._num_empty = num_new_empty + (num_needed - len(held))
        for index in range(len(held) - 1, -1, -1):
            evictable[held[index]] = hashes[index]
        return num_hits * size


def simulate_cache(prompts: Iterable[tuple[Hashes, int]], num_blocks: int, block_size: int) -> CacheRun:
    """Run prompts, given as (hashes of the full blocks, number of tokens), in a pool that is empty at first."""
    cache, num_hit_tokens, num_too_long = SimulatedCache(num_blocks, block_size), 0, 0
    for hashes, num_tokens in prompts:
        num_hits = cache.run(hashes.tolist(), num_tokens)
        if num_hits is None:
            num_too_long += 1
        else:
            num_hit_tokens += num_hits
    return CacheRun(num_hit_tokens, num_too_long)
