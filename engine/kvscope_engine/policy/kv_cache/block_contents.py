"""Returns the tokens in a block, for a user who selects it in the page map."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.commands import BlockContent


def block_content(
    block: int, pool: BlockPool, requests: Mapping[int, Request], prefix_of: Callable[[int], Prefix | None]
) -> BlockContent:
    """Return the token ids in the ledger row `block`, without text; empty if the block is empty or does not exist.

    For the row of a recurrent state, these are the tokens of the last block before the state's position. `requests` are
    the unfinished requests by number; `prefix_of` returns the prefix in a row of any tier. The cost is linear in the
    length of the block tables searched.
    """
    if not 0 <= block < pool.ledger.num_blocks or not pool.ledger.filled[block]:
        return BlockContent(block=block)
    owner, filled = int(pool.ledger.owner[block]), int(pool.ledger.filled[block])
    prefix = prefix_of(block)
    if prefix is not None:
        notes = _cache_separators(prefix.adapter, prefix.salt)
        return BlockContent(block=block, number=owner, start=prefix.start, token_ids=prefix.token_ids, notes=notes)
    is_state = block >= pool.first_state
    holder = requests.get(owner) if is_state else _holder(block, owner, requests)
    if holder is None:
        return BlockContent(block=block)
    if is_state:
        filled = holder.num_saved_tokens or holder.num_computed_tokens
        start = max(0, filled - 1) // pool.block_size * pool.block_size
        filled -= start
    else:
        start = holder.kv_tables[int(pool.ledger.group[block])].index(block) * pool.block_size
    tokens = tuple(holder.tokens(start, start + filled))
    notes = _cache_separators("" if holder.adapter is None else holder.adapter.name, "" if start else holder.cache_salt)
    return BlockContent(block=block, number=holder.number, start=start, token_ids=tokens, notes=notes)


def _cache_separators(adapter: str, salt: str) -> tuple[tuple[str, str], ...]:
    """Return (name, value) of the LoRA adapter and the cache salt, which separate equal texts in the prefix cache.

    Missing ones are left out.
    """
    return tuple((name, text) for name, text in (("LoRA", adapter), ("Cache salt", salt)) if text)


def _holder(block: int, owner: int, requests: Mapping[int, Request]) -> Request | None:
    """Return a request whose block tables contain the block: its owner if possible, else another request that
    shares it.
    """
    request = requests.get(owner)
    if request is not None and _tables_contain(request, block):
        return request
    return next((other for other in requests.values() if _tables_contain(other, block)), None)


def _tables_contain(request: Request, block: int) -> bool:
    tables = zip(request.kv_tables, request.num_null_blocks, strict=True)
    return any(block in table[num_null:] for table, num_null in tables)
