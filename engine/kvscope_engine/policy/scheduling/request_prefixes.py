"""A request's full blocks in the prefix cache: found at its admission, inserted once computed."""

from __future__ import annotations

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_groups import group_digest
from kvscope_engine.policy.prefixes.prefix_history import Miss
from kvscope_engine.policy.prefixes.prefix_index import Prefix, PrefixIndex, pack_tokens
from kvscope_engine.policy.request import Request


def usable_digests(pool: BlockPool, request: Request) -> list[bytes]:
    """Return the digests of the full blocks that the request could reuse, in order.

    Empty without a prefix cache, and for a request whose prompt tokens are scored, because they must be computed.
    """
    if pool.index is None or request.scores_prompt:
        return []
    usable = (request.num_tokens - 1) // pool.block_size
    _extend_digests(pool.index, pool.block_size, request, usable)
    return request.block_digests[:usable]


def explain_miss(pool: BlockPool, request: Request, num_found: int) -> Miss:
    """Return why the request found only `num_found` cached blocks; an empty `Miss` if it found all.

    A prefix that is one block longer needs blocks in each KV group. The result explains the first of these blocks that
    is not cached.
    """
    if pool.history is None or request.scores_prompt or num_found >= (request.num_tokens - 1) // pool.block_size:
        return Miss()
    group, index = _first_missing(pool, request, num_found + 1)
    return pool.history.explain(_prefix_at(pool, request, index, group))


def _first_missing(pool: BlockPool, request: Request, num_blocks: int) -> tuple[int, int]:
    """Return (KV group, block index) of the first block that is not cached although it is needed to continue
    after `num_blocks` blocks.
    """
    assert pool.index is not None, "a history without an index"
    for group, rule in enumerate(pool.groups):
        for index in range(rule.num_unread(num_blocks * pool.block_size, pool.block_size), num_blocks):
            if pool.index.get(group_digest(request.block_digests[index], group)) is None:
                return group, index
    return 0, num_blocks - 1


def prefix_at(pool: BlockPool, request: Request, index: int, group: int) -> Prefix | None:
    """Return the prefix of the full block at `index`, cached or not; None without a prefix cache."""
    if pool.index is None:
        return None
    _extend_digests(pool.index, pool.block_size, request, index + 1)
    return _prefix_at(pool, request, index, group)


def seal_blocks(pool: BlockPool, request: Request, first: int, stop: int) -> None:
    """Insert the full blocks `first` to `stop` (exclusive) of the request's block tables into the prefix cache."""
    if pool.index is None:
        return
    _extend_digests(pool.index, pool.block_size, request, stop)
    for group, table in enumerate(request.block_tables):
        for index in range(max(first, request.num_null_blocks[group]), stop):
            pool.seal(table[index], _prefix_at(pool, request, index, group))


def _prefix_at(pool: BlockPool, request: Request, index: int, group: int) -> Prefix:
    """Return the prefix of the block at `index`. The digests up to that block must be computed already."""
    start = index * pool.block_size
    tokens = pack_tokens(request.tokens(start, start + pool.block_size))
    digest = group_digest(request.block_digests[index], group)
    name = "" if request.adapter is None else request.adapter.name
    if not index:
        return Prefix(digest, 0, tokens, b"", request.cache_salt, name, _adapter_key(request))
    return Prefix(digest, start, tokens, group_digest(request.block_digests[index - 1], group), adapter=name)


def _adapter_key(request: Request) -> bytes:
    return b"" if request.adapter is None else request.adapter.key


def _extend_digests(index: PrefixIndex, block_size: int, request: Request, count: int) -> None:
    known = len(request.block_digests)
    if known < count:
        tokens = request.tokens(known * block_size, count * block_size)
        index.extend(request.block_digests, tokens, request.cache_salt, _adapter_key(request))
