"""The requests that changed in many frames, who ran, and which blocks moved, as columns of a bundle.

Owns what these are told by: the row before of that request, and the blocks and requests that the same frame names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np

from kvscope_telemetry.messages.request_words import RequestState
from kvscope_telemetry.messages.telemetry import Batch, Moves, RequestRows
from kvscope_telemetry.recordings.bundles.groups import (
    Groups,
    accepted,
    cut_up,
    joined,
    joined_as,
    pack_counts,
    unpack_counts,
    with_zeros,
)
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, pack_deltas, unpack, unpack_deltas
from kvscope_telemetry.recordings.bundles.keyed import Flags, Foretold, Keyed
from kvscope_telemetry.recordings.bundles.references import (
    Known,
    pack_chained,
    pack_found,
    pack_ids,
    told_ids,
    unpack_chained,
    unpack_found,
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
_BY_STEP: Final = ("num_computed_tokens", "num_output_tokens")
"""Of the plain ones those that who ran foretells."""
_parts_of: Final = attrgetter(*_PLAIN, "table_start", "table_count", *IF_ANY, "table_blocks")
_moves_of: Final = attrgetter(*Moves.__struct_fields__)
_FORMS: Final = (*_PLAIN.values(), "<u4", "<u4")


@dataclass(frozen=True, slots=True)
class Ran:
    """Who ran in the frames of a bundle."""

    counts: Ints
    """How many, an entry a frame."""
    tokens: Ints
    """Of each request that changed, how many of its tokens are of that step; 0 where it did not run."""


@dataclass(frozen=True, slots=True)
class Changed:
    """What requests that changed in the frames of a bundle foretell."""

    groups: Groups
    computed: Ints
    takers: Ints
    """Of each row of blocks the request to whose table it came in that frame, -1 for none."""


def pack_requests(
    rows: Sequence[RequestRows], known: Known, blocks: Known, ran: Ran
) -> tuple[dict[str, bytes], Changed]:
    """`rows` a frame, whose requests are `known`, beside the blocks that it names and who ran. Raises ValueError for
    columns that are longer or shorter than they should be."""
    groups, requests = known.groups, Keyed(known.ids)
    *parts, drafts, taken, table_blocks = zip(*map(_parts_of, rows), strict=True)
    *plain, starts, counts = (joined_as(part, form, groups.counts) for part, form in zip(parts, _FORMS, strict=True))
    columns = dict(zip(_PLAIN, plain, strict=True))
    packed = {"rows": pack_counts(groups)}
    packed |= dict(zip(("number", "new_number"), pack_chained(known), strict=True))
    packed |= {name: requests.pack(columns[name]) for name in _PLAIN if name not in _BY_STEP}
    for name, part in zip(IF_ANY, (drafts, taken), strict=True):
        packed[name] = requests.pack(_joined_if_any(part, groups))
    ends_at_0 = _end_at_0(columns)
    packed["ends_at_0"] = pack(np.array([ends_at_0]))
    for name in _BY_STEP:
        packed[name] = requests.pack(columns[name], _by_step(name, columns, requests, ran, ends_at_0))
    size, expected = _expected_counts(columns["num_computed_tokens"], requests, counts)
    packed["block_size"], packed["table_count"] = pack(np.array([size])), pack(counts - expected)
    packed["table_start"] = requests.pack(starts, _begins(columns, requests, ran, counts, size, ends_at_0))
    tables, table_groups = joined(table_blocks, "<u4")
    if not np.array_equal(table_groups.counts, groups.sums(counts)):
        packed["table_rows"] = pack_counts(table_groups)
    told, found = pack_found(tables, table_groups, blocks)
    packed |= dict(zip(("table", "new_table"), told, strict=True))
    takers = _takers(found, known.ids, counts, blocks.groups)
    return packed, Changed(groups, columns["num_computed_tokens"], takers)


def unpack_numbers(packed: Mapping[str, bytes], num_frames: int) -> tuple[Ints, Groups]:
    """Which requests changed in each frame."""
    groups = unpack_counts(packed["rows"], num_frames)
    return unpack_chained((packed["number"], packed["new_number"]), groups), groups


def unpack_requests(
    packed: Mapping[str, bytes],
    numbers: Ints,
    groups: Groups,
    ids: Ints,
    id_groups: Groups,
    ran: Ran,
    *,
    together: bool = False,
) -> tuple[list[RequestRows], Changed]:
    """The rows that `pack_requests` was given, of requests `numbers` in `groups`, beside blocks `ids` in groups.
    `together`: those of all frames one after another."""
    requests = Keyed(numbers)
    size = int(unpack(packed["block_size"], 1)[0]) if "block_size" in packed else 0
    if "ends_at_0" in packed:
        ends_at_0 = int(unpack(packed["ends_at_0"], 1)[0])
        columns = {name: requests.unpack(packed[name]) for name in _PLAIN if name not in _BY_STEP}
        for name in _BY_STEP:
            columns[name] = requests.unpack(packed[name], _by_step(name, columns, requests, ran, ends_at_0))
        counts = unpack(packed["table_count"], groups.num_rows)
        counts += _new_blocks(columns["num_computed_tokens"], requests, size)
        starts = requests.unpack(packed["table_start"], _begins(columns, requests, ran, counts, size, ends_at_0))
    else:  # in earlier versions
        columns = {name: requests.unpack(packed[name]) for name in _PLAIN}
        counts = unpack(packed["table_count"], groups.num_rows)
        counts += _new_blocks(columns["num_computed_tokens"], requests, size)
        starts = requests.summed(unpack(packed["table_start"], groups.num_rows) + requests.before(counts))
    if "table_rows" in packed:
        table_groups = unpack_counts(packed["table_rows"], len(groups.counts))
    else:
        table_groups = accepted(groups.sums(counts))
    tables, found = unpack_found((packed["table"], packed["new_table"]), table_groups, ids, id_groups)
    changed = Changed(groups, columns["num_computed_tokens"], _takers(found, numbers, counts, id_groups))
    if together:
        groups, table_groups = Groups.together(groups), Groups.together(table_groups)
    cut = [cut_up(numbers, "<u4", groups)]
    cut += [cut_up(columns[name], form, groups) for name, form in _PLAIN.items()]
    cut += [cut_up(starts, "<u4", groups), cut_up(counts, "<u4", groups), cut_up(tables, "<u4", table_groups)]
    for name in IF_ANY:
        column = requests.unpack(packed[name])
        told = cut_up(column, "<u4", groups) if column.any() else [b""] * len(groups.counts)
        cut.append([each if any(each) else b"" for each in told])
    return [RequestRows(*each) for each in zip(*cut, strict=True)], changed


def _joined_if_any(parts: Sequence[bytes], groups: Groups) -> Ints:
    if not any(parts):
        return np.zeros(groups.num_rows, np.int64)
    return joined_as(with_zeros(parts, 4, groups.counts.tolist()), "<u4", groups.counts)


def _has_ended(columns: Mapping[str, Ints]) -> Flags:
    state = columns["state"]
    ended: Flags = (state == RequestState.FINISHED) | (state == RequestState.PREEMPTED)
    return ended


def _end_at_0(columns: Mapping[str, Ints]) -> int:
    """1 where most requests that end, or go back to the queue, have nothing computed any more."""
    left = columns["num_computed_tokens"][_has_ended(columns)]
    return int(2 * np.count_nonzero(left) < left.size)


def _by_step(name: str, columns: Mapping[str, Ints], requests: Keyed, ran: Ran, ends_at_0: int) -> Foretold:
    """A step computes the tokens that ran; one alone makes an output."""
    is_first = np.zeros(ran.tokens.size, np.bool_)
    is_first[requests.firsts] = True
    if name == "num_output_tokens":
        outputs = (ran.tokens == 1).astype(np.int64)
        return Foretold(is_first, outputs, outputs)
    first, at = ran.tokens + columns["num_cached_tokens"], is_first
    if ends_at_0:
        ended = _has_ended(columns)
        first[ended], at = 0, is_first | ended
    return Foretold(at, first, ran.tokens)


def _begins(
    columns: Mapping[str, Ints], requests: Keyed, ran: Ran, counts: Ints, size: int, ends_at_0: int
) -> Foretold:
    """A table goes on where it was told to; the first time behind the blocks that are full."""
    foretold = _by_step("num_computed_tokens", columns, requests, ran, ends_at_0)
    before = columns["num_computed_tokens"] - ran.tokens
    begins = -(-before // size) if size > 0 else np.zeros(before.size, np.int64)
    if ends_at_0:
        begins[_has_ended(columns)] = 0
    return Foretold(foretold.at, begins, requests.before(counts))


def _takers(found: Ints, numbers: Ints, counts: Ints, blocks: Groups) -> Ints:
    """`found`: of each entry of a table the row of its block, -1 for none; `counts` entries are of each request."""
    takers = np.full(blocks.num_rows, -1)
    if found.size and counts.min() >= 0 and int(counts.sum()) == found.size:
        is_found = found >= 0
        takers[found[is_found]] = np.repeat(numbers, counts)[is_found]
    return takers


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


def pack_batches(batches: Sequence[Batch], changed: Known) -> tuple[dict[str, bytes], Ran]:
    """Who ran in each frame, beside the requests that changed in it."""
    ran, groups = joined([batch.number for batch in batches], "<u4")
    tokens = joined_as([batch.num_tokens for batch in batches], "<u4", groups.counts)
    told, rows = pack_found(ran, groups, changed)
    packed = {"ran_rows": pack_counts(groups), "num_tokens": pack(tokens)}
    packed |= dict(zip(("ran", "new_ran"), told, strict=True))
    return packed, _ran(groups, rows, tokens, changed.groups)


def unpack_batches(
    packed: Mapping[str, bytes], num_frames: int, numbers: Ints, number_groups: Groups, sums: Sequence[Sequence[int]]
) -> tuple[list[Batch], Ran]:
    """The batches that `pack_batches` was given; `sums` are their two numbers, a list each."""
    groups = unpack_counts(packed["ran_rows"], num_frames)
    ran, rows = unpack_found((packed["ran"], packed["new_ran"]), groups, numbers, number_groups)
    tokens = unpack(packed["num_tokens"], groups.num_rows)
    cut = (cut_up(ran, "<u4", groups), cut_up(tokens, "<u4", groups))
    return [Batch(*each) for each in zip(*cut, *sums, strict=True)], _ran(groups, rows, tokens, number_groups)


def _ran(groups: Groups, rows: Ints, tokens: Ints, changed: Groups) -> Ran:
    """`rows`: which of those that changed each is, -1 for none."""
    of_changed = np.zeros(changed.num_rows, np.int64)
    of_changed[rows[rows >= 0]] = tokens[rows >= 0]
    return Ran(groups.counts, of_changed)


def pack_moves(moves: Sequence[Moves], blocks: Known) -> dict[str, bytes]:
    """The blocks that moved in each frame, beside those that it names."""
    packed: dict[str, bytes] = {}
    for name, parts in zip(Moves.__struct_fields__, zip(*map(_moves_of, moves), strict=True), strict=True):
        moved, groups = joined(parts, "<u4")
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
