"""What tokens a block holds, for who asks about a block of the page map."""

from __future__ import annotations

from collections.abc import Mapping

from kvscope_engine.policy.block_pool import BlockPool
from kvscope_engine.policy.request import Request
from kvscope_telemetry.commands import BlockContent


def block_content(block: int, pool: BlockPool, requests: Mapping[int, Request]) -> BlockContent:
    """The token ids in `block`, without text; none when it holds nothing, or does not exist.

    `requests` are the unfinished ones by number. Costs the length of the block tables that are searched.
    """
    if not 0 <= block < pool.num_blocks or not pool.ledger.filled[block]:
        return BlockContent(block=block)
    owner, filled = int(pool.ledger.owner[block]), int(pool.ledger.filled[block])
    prefix = pool.prefix(block)
    if prefix is not None:
        return BlockContent(block=block, number=owner, start=prefix.start, token_ids=prefix.token_ids)
    holder = _holder(block, owner, requests)
    if holder is None:
        return BlockContent(block=block)
    start = holder.block_table.index(block) * pool.block_size
    tokens = tuple(holder.tokens(start, start + filled))
    return BlockContent(block=block, number=holder.number, start=start, token_ids=tokens)


def _holder(block: int, owner: int, requests: Mapping[int, Request]) -> Request | None:
    """A request whose table has the block: the one that wrote it, or another that shares it."""
    request = requests.get(owner)
    if request is not None and block in request.block_table:
        return request
    return next((other for other in requests.values() if block in other.block_table), None)
