"""The requests that changed in many frames, who ran, and which blocks moved, as columns of a bundle.

Owns what these are told by: the row before of that request, and the blocks and requests that the same frame names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from kvscope_telemetry.messages.telemetry import Batch, Moves, RequestRows
from kvscope_telemetry.recordings.bundles.groups import Groups, cut_up, joined, joined_as, pack_counts, unpack_counts
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, pack_deltas, unpack, unpack_deltas
from kvscope_telemetry.recordings.bundles.keyed import Keyed
from kvscope_telemetry.recordings.bundles.references import (
    Known,
    pack_chained,
    pack_ids,
    told_ids,
    unpack_chained,
    unpack_ids,
)

_SIZES: Final = (8, 16, 32, 64, 128)
"""Of blocks, in tokens: most engines' are among them; for others more is told."""
_PLAIN: Final = {
    "state": "u1",
    "num_computed_tokens": "<u4",
    "num_cached_tokens": "<u4",
    "num_output_tokens": "<u4",
    "num_preemptions": "<u2",
}
IF_ANY: Final = ("num_draft_tokens", "num_accepted_tokens")
"""u32, and empty in a frame in which they are 0 for all."""
REQUEST_COLUMNS: Final = {"number": "<u4"} | _PLAIN | {"table_start": "<u4", "table_count": "<u4"}
"""Those with an entry a request, and its form."""


def pack_requests(rows: Sequence[RequestRows], changed: Known, blocks: Known) -> dict[str, bytes]:
    """`rows` a frame, whose requests are `changed`, beside the blocks that it names. Raises ValueError for columns that
    are longer or shorter than they should be."""
    numbers, groups = changed.ids, changed.groups
    columns = {
        name: joined_as([getattr(each, name) for each in rows], form, groups.counts) for name, form in _PLAIN.items()
    }
    for name in IF_ANY:
        counts_told = [getattr(each, name) or bytes(len(each.number)) for each in rows]
        columns[name] = joined_as(counts_told, "<u4", groups.counts)
    starts = joined_as([each.table_start for each in rows], "<u4", groups.counts)
    counts = joined_as([each.table_count for each in rows], "<u4", groups.counts)
    tables, table_groups = joined([each.table_blocks for each in rows], "<u4")
    requests = Keyed(numbers)
    packed = {"rows": pack_counts(groups), "table_rows": pack_counts(table_groups)}
    packed |= dict(zip(("number", "new_number"), pack_chained(changed), strict=True))
    packed |= {name: requests.pack(column) for name, column in columns.items()}
    size, expected = _expected_counts(columns["num_computed_tokens"], requests, counts)
    packed["block_size"], packed["table_count"] = pack(np.array([size])), pack(counts - expected)
    packed["table_start"] = pack(starts - requests.before(starts + counts))
    return packed | dict(zip(("table", "new_table"), pack_ids(tables, table_groups, blocks), strict=True))


def unpack_requests(
    packed: Mapping[str, bytes], num_frames: int, ids: Ints, id_groups: Groups
) -> tuple[list[RequestRows], Ints, Groups]:
    """The rows that `pack_requests` was given, and their numbers."""
    groups, table_groups = (unpack_counts(packed[name], num_frames) for name in ("rows", "table_rows"))
    numbers = unpack_chained((packed["number"], packed["new_number"]), groups)
    requests = Keyed(numbers)
    columns = {name: requests.unpack(packed[name]) for name in _PLAIN}
    counts = unpack(packed["table_count"], groups.num_rows)
    if "block_size" in packed:  # in earlier versions they lie as they are
        size = int(unpack(packed["block_size"], 1)[0])
        counts += _new_blocks(columns["num_computed_tokens"], requests, size)
    starts = requests.summed(unpack(packed["table_start"], groups.num_rows) + requests.before(counts))
    tables = unpack_ids((packed["table"], packed["new_table"]), table_groups, ids, id_groups)
    cut = [cut_up(numbers, "<u4", groups)]
    cut += [cut_up(columns[name], form, groups) for name, form in _PLAIN.items()]
    cut += [cut_up(starts, "<u4", groups), cut_up(counts, "<u4", groups), cut_up(tables, "<u4", table_groups)]
    for name in IF_ANY:
        cut.append([told if any(told) else b"" for told in cut_up(requests.unpack(packed[name]), "<u4", groups)])
    return [RequestRows(*each) for each in zip(*cut, strict=True)], numbers, groups


def _expected_counts(computed: Ints, requests: Keyed, counts: Ints) -> tuple[int, Ints]:
    """The size of a block that foretells most of `counts`, and what it does."""
    best = 0, _new_blocks(computed, requests, 0)
    for size in _SIZES:
        expected = _new_blocks(computed, requests, size)
        if np.count_nonzero(counts - expected) < np.count_nonzero(counts - best[1]):
            best = size, expected
    return best


def _new_blocks(computed: Ints, requests: Keyed, size: int) -> Ints:
    """How many blocks of `size` tokens a request has more than in its row before; 0 in its first row."""
    if size <= 0:
        return np.zeros(computed.size, np.int64)
    blocks = -(-computed // size)
    more = requests.changes(blocks)
    more[requests.firsts] = 0
    found: Ints = np.maximum(more, 0)
    return found


def pack_batches(batches: Sequence[Batch], changed: Known) -> dict[str, bytes]:
    """Who ran in each frame, beside the requests that changed in it."""
    ran, groups = joined([batch.number for batch in batches], "<u4")
    tokens = joined_as([batch.num_tokens for batch in batches], "<u4", groups.counts)
    packed = {"ran_rows": pack_counts(groups), "num_tokens": pack(tokens)}
    return packed | dict(zip(("ran", "new_ran"), pack_ids(ran, groups, changed), strict=True))


def unpack_batches(
    packed: Mapping[str, bytes], num_frames: int, numbers: Ints, number_groups: Groups, sums: Sequence[Sequence[int]]
) -> list[Batch]:
    """The batches that `pack_batches` was given; `sums` are their two numbers, a list each."""
    groups = unpack_counts(packed["ran_rows"], num_frames)
    ran = unpack_ids((packed["ran"], packed["new_ran"]), groups, numbers, number_groups)
    cut = (cut_up(ran, "<u4", groups), cut_up(unpack(packed["num_tokens"], groups.num_rows), "<u4", groups))
    return [Batch(*each) for each in zip(*cut, *sums, strict=True)]


def pack_moves(moves: Sequence[Moves], blocks: Known) -> dict[str, bytes]:
    """The blocks that moved in each frame, beside those that it names."""
    packed: dict[str, bytes] = {}
    for name in Moves.__struct_fields__:
        moved, groups = joined([getattr(each, name) for each in moves], "<u4")
        packed[f"{name}_rows"] = pack_counts(groups)
        packed[name], packed[f"new_{name}"] = pack_ids(moved, groups, blocks)
    return packed


def unpack_moves(packed: Mapping[str, bytes], num_frames: int, ids: Ints, id_groups: Groups) -> list[Moves]:
    """The moves that `pack_moves` was given."""
    cut: list[list[bytes]] = []
    for name in Moves.__struct_fields__:
        groups = unpack_counts(packed[f"{name}_rows"], num_frames)
        moved = unpack_ids((packed[name], packed[f"new_{name}"]), groups, ids, id_groups)
        cut.append(cut_up(moved, "<u4", groups))
    return [Moves(*each) for each in zip(*cut, strict=True)]


def moves_others(packed: Mapping[str, bytes], num_frames: int, block: int) -> bool:
    """Whether `block` moved in a frame that does not name it."""
    for name in Moves.__struct_fields__:
        groups = unpack_counts(packed[f"{name}_rows"], num_frames)
        if np.any(told_ids((packed[name], packed[f"new_{name}"]), groups.num_rows) == block):
            return True
    return False


def pack_times(parts: Sequence[bytes]) -> tuple[bytes, bytes]:
    """How many times each frame has, and the times."""
    times, groups = joined(parts, "<u8")
    return pack_counts(groups), pack_deltas(times)


def unpack_times(data: tuple[bytes, bytes], num_frames: int) -> list[bytes]:
    """The times that `pack_times` was given."""
    groups = unpack_counts(data[0], num_frames)
    return cut_up(unpack_deltas(data[1], groups.num_rows), "<u8", groups)
