"""A request's full blocks and the prefix cache: found when it is admitted, entered once computed."""

from __future__ import annotations

from kvscope_engine.policy.block_pool import BlockPool
from kvscope_engine.policy.prefix_index import Prefix, PrefixIndex, pack_tokens
from kvscope_engine.policy.request import Request


def find_prefix(pool: BlockPool, request: Request) -> list[int]:
    """Blocks that hold the request's first tokens already; at least one token is left to compute."""
    if pool.index is None:
        return []
    usable = (request.num_tokens - 1) // pool.block_size
    _extend_digests(pool.index, pool.block_size, request, usable)
    return pool.index.find(request.block_digests[:usable])


def seal_blocks(pool: BlockPool, request: Request, first: int, stop: int) -> None:
    """Blocks `first` to `stop` (exclusive) of the request's table are full: later prompts may find them."""
    if pool.index is None:
        return
    size = pool.block_size
    _extend_digests(pool.index, size, request, stop)
    for place in range(first, stop):
        start = place * size
        tokens = pack_tokens(request.tokens(start, start + size))
        pool.seal(request.block_table[place], Prefix(request.block_digests[place], start, tokens))


def _extend_digests(index: PrefixIndex, block_size: int, request: Request, count: int) -> None:
    known = len(request.block_digests)
    if known < count:
        index.extend(request.block_digests, request.tokens(known * block_size, count * block_size))
