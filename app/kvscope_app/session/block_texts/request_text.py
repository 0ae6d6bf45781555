"""Prompt and output text of a request: finds its blocks and joins their texts. Imports no Qt.

Texts are stored per block. For a long request, only both ends of prompt and output are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from kvscope_app.session.block_texts.session_texts import lookup_of
from kvscope_telemetry.block_texts.block_texts import BlockTextLookup
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.prefixes.cached_blocks import group_of_tree

MAX_BLOCKS_PER_END: Final = 64
"""Maximum number of blocks read at each end of the prompt and of the output."""
_MAX_OWNERS: Final = 8
"""Maximum number of requests whose cached blocks are searched for the blocks of one request.

A request's prefix may consist of blocks that several earlier requests wrote.
"""
_MAX_BLOCKS: Final = 8192
PROMPT, BETWEEN, OUTPUT = "Prompt", "Prompt ends, output begins", "Output"
NOT_IN_BLOCKS: Final = "None of its tokens is in a block at this time."


@dataclass(frozen=True, slots=True)
class TextBlock:
    index: int
    part: str
    lookup: BlockTextLookup


def text_blocks(mirror: Mirror, number: int) -> list[TextBlock]:
    """Return the blocks to read for request `number`. For a finished request, these are the blocks that it left in the
    cache.
    """
    row = mirror.requests.row_of(number)
    if row is None or mirror.hello is None:
        return []
    rows = mirror.requests.table(number).tolist() or cached_rows(mirror, number)
    size, num_prompt = mirror.hello.cache.block_size, int(mirror.requests.num_prompt_tokens[row])
    end = len(rows)
    prompt_end, output_begin = min(num_prompt // size, end), min(-(-num_prompt // size), end)
    if not mirror.requests.num_output_tokens[row]:
        prompt_end = output_begin = end
    parts = ((PROMPT, 0, prompt_end), (BETWEEN, prompt_end, output_begin), (OUTPUT, output_begin, end))
    return [
        TextBlock(index, part, lookup_of(mirror, rows[index]))
        for part, first, until in parts
        for index in _indexes_of_both_ends(first, until)
        if mirror.ledger.filled[rows[index]]
    ]


def text_parts(
    blocks: list[TextBlock], get: Callable[[BlockTextLookup], BlockContent | None], why_not: str
) -> Iterator[tuple[str, str]]:
    """Yield (title, text) for the prompt, the output, and the block that has the end of the prompt and the start of the
    output.

    If no text is known and `why_not` is not empty, yield only `why_not`.
    """
    if not blocks:
        yield "Text", NOT_IN_BLOCKS
        return
    contents = {block.index: get(block.lookup) for block in blocks}
    if why_not and not any(contents.values()):
        yield "Text", why_not
        return
    for part, group in groupby(blocks, key=lambda block: block.part):
        yield part, _joined_text([block.index for block in group], contents) or "(no printable text)"


def cached_rows(mirror: Mirror, number: int) -> list[int]:
    """Return the ledger rows, in order, of the full blocks that a request left in the cache, including its shared
    prefix.
    """
    assert mirror.hello is not None, "a request is shown only once there is an engine"
    ledger, group = mirror.ledger, group_of_tree(mirror.hello.cache) or 0
    own_rows = np.flatnonzero((ledger.owner == number) & (ledger.hash != 0) & (ledger.group == group))
    last_rows = own_rows[~np.isin(ledger.hash[own_rows], ledger.parent[own_rows])]
    if not last_rows.size:
        return []
    rows_from_end: list[int] = []
    rows = {int(ledger.hash[row]): int(row) for row in own_rows.tolist()}
    row_index, num_owners = int(last_rows[-1]), 1
    while len(rows_from_end) < _MAX_BLOCKS:
        rows_from_end.append(row_index)
        parent_hash = int(ledger.parent[row_index])
        if parent_hash and parent_hash not in rows:
            candidates = np.flatnonzero(ledger.hash == parent_hash)
            if not candidates.size or num_owners == _MAX_OWNERS:
                break
            owner_rows = np.flatnonzero((ledger.owner == ledger.owner[candidates[0]]) & (ledger.hash != 0))
            rows |= {int(ledger.hash[row]): int(row) for row in (*owner_rows.tolist(), int(candidates[0]))}
            num_owners += 1
        if not parent_hash:
            break
        row_index = rows[parent_hash]
    return rows_from_end[::-1]


def _indexes_of_both_ends(first: int, end: int) -> list[int]:
    if end - first <= 2 * MAX_BLOCKS_PER_END:
        return list(range(first, end))
    return [*range(first, first + MAX_BLOCKS_PER_END), *range(end - MAX_BLOCKS_PER_END, end)]


def _joined_text(indexes: list[int], contents: dict[int, BlockContent | None]) -> str:
    parts: list[str] = []
    before = indexes[0] - 1
    for index in indexes:
        content = contents[index]
        if index != before + 1:
            parts.append(f"\n… {index - before - 1} blocks between …\n")
        parts.append("…" if content is None or not content.token_ids else content.text)
        before = index
    return "".join(parts).replace("………", "…")
