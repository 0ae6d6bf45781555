"""A request's full blocks and the prefix cache: found when it is admitted, entered once computed."""

from __future__ import annotations

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.kv_groups import group_digest
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
    """Why the request found `num_found` blocks and not the next one; empty when there was no more to find.

    Of several KV groups, the first that does not have what is read after that block.
    """
    if pool.history is None or num_found >= (request.num_tokens - 1) // pool.block_size:
        return Miss()
    group, place = _first_missing(pool, request, num_found + 1)
    return pool.history.explain(_prefix_at(pool, request, place, group))


def _first_missing(pool: BlockPool, request: Request, end: int) -> tuple[int, int]:
    """A group, and the place in its table, without which a prompt cannot go on after its first `end` blocks."""
    assert pool.index is not None, "a history without an index"
    for group, rule in enumerate(pool.groups):
        for place in range(rule.num_unread(end * pool.block_size, pool.block_size), end):
            if pool.index.get(group_digest(request.block_digests[place], group)) is None:
                return group, place
    return 0, end - 1


def prefix_at(pool: BlockPool, request: Request, place: int, group: int) -> Prefix | None:
    """The prefix of a full block of the request, whether or not any block holds it; None without a prefix cache."""
    if pool.index is None:
        return None
    _extend_digests(pool.index, pool.block_size, request, place + 1)
    return _prefix_at(pool, request, place, group)


def seal_blocks(pool: BlockPool, request: Request, first: int, stop: int) -> None:
    """Blocks `first` to `stop` (exclusive) of the request's tables are full: later prompts may find them."""
    if pool.index is None:
        return
    _extend_digests(pool.index, pool.block_size, request, stop)
    for group, table in enumerate(request.block_tables):
        for place in range(max(first, request.num_let_go[group]), stop):
            pool.seal(table[place], _prefix_at(pool, request, place, group))


def _prefix_at(pool: BlockPool, request: Request, place: int, group: int) -> Prefix:
    """Digests must be known up to `place`."""
    start = place * pool.block_size
    tokens = pack_tokens(request.tokens(start, start + pool.block_size))
    digest = group_digest(request.block_digests[place], group)
    name = "" if request.adapter is None else request.adapter.name
    if not place:
        return Prefix(digest, 0, tokens, b"", request.cache_salt, name, _adapter_key(request))
    return Prefix(digest, start, tokens, group_digest(request.block_digests[place - 1], group), adapter=name)


def _adapter_key(request: Request) -> bytes:
    return b"" if request.adapter is None else request.adapter.key


def _extend_digests(index: PrefixIndex, block_size: int, request: Request, count: int) -> None:
    known = len(request.block_digests)
    if known < count:
        tokens = request.tokens(known * block_size, count * block_size)
        index.extend(request.block_digests, tokens, request.cache_salt, _adapter_key(request))
