"""A request's full blocks and the prefix cache: found when it is admitted, entered once computed."""

from __future__ import annotations

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.prefixes.prefix_history import Miss
from kvscope_engine.policy.prefixes.prefix_index import Prefix, PrefixIndex, pack_tokens
from kvscope_engine.policy.request import Request


def usable_digests(pool: BlockPool, request: Request) -> list[bytes]:
    """Digests of the request's full blocks that it could find, in order; none without a prefix cache."""
    if pool.index is None:
        return []
    usable = (request.num_tokens - 1) // pool.block_size
    _extend_digests(pool.index, pool.block_size, request, usable)
    return request.block_digests[:usable]


def explain_miss(pool: BlockPool, request: Request, num_found: int) -> Miss:
    """Why the request found `num_found` blocks and not the next one; empty when there was no more to find."""
    if pool.history is None or num_found >= (request.num_tokens - 1) // pool.block_size:
        return Miss()
    return pool.history.explain(_prefix_at(pool, request, num_found))


def prefix_at(pool: BlockPool, request: Request, place: int) -> Prefix | None:
    """The prefix of a full block of the request, whether or not any block holds it; None without a prefix cache."""
    if pool.index is None:
        return None
    _extend_digests(pool.index, pool.block_size, request, place + 1)
    return _prefix_at(pool, request, place)


def seal_blocks(pool: BlockPool, request: Request, first: int, stop: int) -> None:
    """Blocks `first` to `stop` (exclusive) of the request's table are full: later prompts may find them."""
    if pool.index is None:
        return
    _extend_digests(pool.index, pool.block_size, request, stop)
    for place in range(first, stop):
        pool.seal(request.block_table[place], _prefix_at(pool, request, place))


def _prefix_at(pool: BlockPool, request: Request, place: int) -> Prefix:
    """Digests must be known up to `place`."""
    start = place * pool.block_size
    tokens = pack_tokens(request.tokens(start, start + pool.block_size))
    digests, adapter = request.block_digests, request.adapter
    name = "" if adapter is None else adapter.name
    if not place:
        return Prefix(digests[0], 0, tokens, b"", request.cache_salt, name, _adapter_key(request))
    return Prefix(digests[place], start, tokens, digests[place - 1], adapter=name)


def _adapter_key(request: Request) -> bytes:
    return b"" if request.adapter is None else request.adapter.key


def _extend_digests(index: PrefixIndex, block_size: int, request: Request, count: int) -> None:
    known = len(request.block_digests)
    if known < count:
        tokens = request.tokens(known * block_size, count * block_size)
        index.extend(request.block_digests, tokens, request.cache_salt, _adapter_key(request))
