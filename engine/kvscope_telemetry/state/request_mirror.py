"""The requests of a mirror: one numpy array a column, one row a request, rows in order of request number.

Owns the columns and how many ended requests are kept; their block tables lie in a `BlockTableBuffer`. Applies changes
by fancy indexing, however many there are; Python loops only over requests that are new. Knows nothing of blocks but
their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, get_type_hints

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import packing_of
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import RequestInfo, RequestRows

Ints = npt.NDArray[np.int64]

_LEAST_ROOM: Final = 8
_FIRST_ENTRIES: Final = 1024
MAX_FINISHED: Final = 10_000
"""Ended requests that are kept, the newest."""

REQUEST_COLUMNS: Final[dict[str, np.dtype[np.generic]]] = {
    "number": np.dtype(np.int64),  # ascending: the row order
    "state": np.dtype(np.uint8),  # RequestState
    "priority": np.dtype(np.int32),
    "index": np.dtype(np.int32),  # which of the n completions of a prompt
    "client": np.dtype(np.int64),  # which client sent it, 0 unknown
    "arrival_ns": np.dtype(np.int64),  # engine's monotonic clock
    "first_seen_ns": np.dtype(np.int64),  # engine's clock at the newest frame of the update that brought it
    "finished_ns": np.dtype(np.int64),  # the same for its end, -1 before
    "num_prompt_tokens": np.dtype(np.int64),
    "max_tokens": np.dtype(np.int64),
    "num_computed_tokens": np.dtype(np.int64),
    "num_cached_tokens": np.dtype(np.int64),
    "num_output_tokens": np.dtype(np.int64),
    "num_preemptions": np.dtype(np.int32),
    "num_draft_tokens": np.dtype(np.int64),  # guessed ahead and checked
    "num_accepted_tokens": np.dtype(np.int64),  # those of them that were right
    "num_blocks": np.dtype(np.int32),  # length of the block table
    "waits_for": np.dtype(np.uint8),  # WaitsFor
}
_TOLD_COLUMNS: Final = ("number", "priority", "index", "client", "arrival_ns", "num_prompt_tokens", "max_tokens")
_TOLD: Final = attrgetter(*_TOLD_COLUMNS)
"""What is told once of a request, when it is new."""
_FIRST_CAPACITY: Final = 64
_SEARCHED: Final = 2_000
"""Requests, the newest, in which an id is looked for."""
MAX_GROUP: Final = 255
"""As the ledger counts them in a byte."""
_ROW_TYPES: Final = {
    name: packing.dtype
    for name, kind in get_type_hints(RequestRows, include_extras=True).items()
    if name != "table_group" and (packing := packing_of(kind)) is not None and packing.is_row
}
"""Columns with a number a row."""


def _length_name(group: int) -> str:
    return f"num_blocks of group {group}" if group else "num_blocks"


class RequestMirror:
    """All requests the engine told of. Attributes are the columns, each shape `(len(self),)`.

    The arrays are views: take them anew after each update. `layout` grows whenever rows moved or went.
    """

    number: npt.NDArray[np.int64]
    state: npt.NDArray[np.uint8]
    priority: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]
    client: npt.NDArray[np.int64]
    arrival_ns: npt.NDArray[np.int64]
    first_seen_ns: npt.NDArray[np.int64]
    finished_ns: npt.NDArray[np.int64]
    num_prompt_tokens: npt.NDArray[np.int64]
    max_tokens: npt.NDArray[np.int64]
    num_computed_tokens: npt.NDArray[np.int64]
    num_cached_tokens: npt.NDArray[np.int64]
    num_output_tokens: npt.NDArray[np.int64]
    num_preemptions: npt.NDArray[np.int32]
    num_draft_tokens: npt.NDArray[np.int64]
    num_accepted_tokens: npt.NDArray[np.int64]
    num_blocks: npt.NDArray[np.int32]
    waits_for: npt.NDArray[np.uint8]

    def __init__(self, max_finished: int = MAX_FINISHED) -> None:
        self.max_finished = max_finished
        self.num_reserved = 0
        """Entries of block tables below it stand for no block (`CacheInfo.num_reserved_blocks`)."""
        self.group_of_states = -1
        """The KV group whose tables have recurrent states and no blocks (`CacheInfo.group_of_states`)."""
        self.layout = 0
        self.request_ids: list[str] = []
        self.adapters: list[str] = []
        """LoRA adapters by name, one a row; empty: none."""
        self._clear()

    def __len__(self) -> int:
        return len(self.request_ids)

    def row_of(self, number: int) -> int | None:
        """The row of request `number`, None when it is not (or no longer) known."""
        row = int(np.searchsorted(self.number, number))
        return row if row < len(self) and int(self.number[row]) == number else None

    def request_id(self, number: int) -> str:
        """What the client called request `number`, empty when it is not known."""
        row = self.row_of(number)
        return "" if row is None else self.request_ids[row]

    def newest_with(self, request_id: str) -> int:
        """The number of the newest whose id has this one in it, 0 for none: a server makes its own of a client's."""
        rows = range(len(self) - 1, max(-1, len(self) - 1 - _SEARCHED), -1)
        return next((int(self.number[row]) for row in rows if request_id in self.request_ids[row]), 0)

    def table(self, number: int, group: int = 0) -> npt.NDArray[np.int32]:
        """The block table that request `number` has in a KV group, shape (n,), a copy; empty when it is not known."""
        row = self.row_of(number)
        return np.empty(0, np.int32) if row is None or group not in self._tables else self.held(row, group).copy()

    def blocks(self, number: int, group: int | None = None) -> npt.NDArray[np.int32]:
        """Those that request `number` holds, in the order of its block tables, one after another, or of that of a KV
        group, shape (n,): entries of a table apart that stand for no block."""
        groups = self._tables if group is None else (group,)
        entries = np.concatenate([self.table(number, each) for each in groups])
        return entries[entries >= self.num_reserved]

    @property
    def num_held(self) -> npt.NDArray[np.int32]:
        """How many blocks each holds, of all KV groups but that of `group_of_states`, shape `(len(self),)`."""
        if len(self._tables) == 1 and not self.num_reserved:
            return self.num_blocks
        held = np.zeros(len(self), np.int32)
        for group, tables in self._tables.items():
            if group == self.group_of_states:
                continue
            lengths = self._lengths(group)
            held += lengths
            if self.num_reserved:
                held -= tables.num_below(self.num_reserved, lengths)
        return held

    @property
    def groups(self) -> list[int]:
        """KV groups of which block tables were told, the first in any case; `num_blocks` is of that one."""
        return list(self._tables)

    def pack(self, rows: npt.NDArray[np.intp], starts: npt.NDArray[np.int64]) -> RequestRows:
        """How the requests in `rows` stand, with their block tables of the first KV group from entry `starts` on, both
        shape (n,), and whole ones of the others."""
        num_groups, (first, *others) = len(self._tables), self._tables
        tails = [self.held(row, first)[start:] for row, start in zip(rows.tolist(), starts.tolist(), strict=True)]
        tails += [self.held(row, group) for group in others for row in rows.tolist()]
        groups = np.repeat(list(self._tables), len(rows))
        starts = np.concatenate((starts, np.zeros(len(tails) - len(rows), np.int64)))
        rows = np.tile(rows, num_groups)

        def packed(name: str, dtype: str) -> bytes:
            return bytes(getattr(self, name)[rows].astype(dtype).tobytes())

        return RequestRows(
            number=packed("number", "<u4"),
            state=packed("state", "u1"),
            num_computed_tokens=packed("num_computed_tokens", "<u4"),
            num_cached_tokens=packed("num_cached_tokens", "<u4"),
            num_output_tokens=packed("num_output_tokens", "<u4"),
            num_preemptions=packed("num_preemptions", "<u2"),
            table_start=starts.astype("<u4").tobytes(),
            table_count=np.array([len(tail) for tail in tails], "<u4").tobytes(),
            table_blocks=b"".join([tail.astype("<u4").tobytes() for tail in tails]),
            num_draft_tokens=self._packed_if_any("num_draft_tokens", rows),
            num_accepted_tokens=self._packed_if_any("num_accepted_tokens", rows),
            table_group=groups.astype("<u4").tobytes() if others else b"",
            waits_for=self._packed_if_any("waits_for", rows),
        )

    def _packed_if_any(self, name: str, rows: npt.NDArray[np.intp]) -> bytes:
        values = getattr(self, name)[rows]
        return bytes(values.astype("<u4").tobytes()) if values.any() else b""

    def holders(self, block: int, limit: int, first: int = 0) -> list[int]:
        """Requests whose block tables hold `block`, in order of number, at most `limit`. `first` is looked at first:
        with the owner there, a block that one request holds costs no search."""
        rows = np.flatnonzero(np.any([self._lengths(group) > 0 for group in self._tables], axis=0)).tolist()
        row = self.row_of(first)
        ordered = rows if row is None else [row, *(other for other in rows if other != row)]
        found: list[int] = []
        for candidate in ordered:
            if len(found) == limit:
                break
            if any(np.any(self.held(candidate, group) == block) for group in self._tables):
                found.append(int(self.number[candidate]))
        return sorted(found)

    def place_in_tables(self, number: int, block: int) -> tuple[int, int] | None:
        """In the block table of which KV group of request `number` a block is, and its index there; None: in none."""
        row = self.row_of(number)
        if row is None:
            return None
        for group in self._tables:
            at = np.flatnonzero(self.held(row, group) == block)
            if at.size:
                return group, int(at[0])
        return None

    def held(self, row: int, group: int) -> npt.NDArray[np.int32]:
        """The block table of a row, no copy."""
        return self._tables[group].first(row, int(self._lengths(group)[row]))

    def _lengths(self, group: int) -> npt.NDArray[np.int32]:
        """Of the block tables, shape `(len(self),)`, to be written to as well."""
        lengths: npt.NDArray[np.int32] = self._data[_length_name(group)][: len(self)]
        return lengths

    def reset(self, infos: Sequence[RequestInfo], rows: RequestRows, *, time_ns: int, same_epoch: bool) -> None:
        """Replace what is known by a snapshot's unfinished requests.

        Within an epoch, ended requests stay, and one that the snapshot no longer has ended unseen. Raises
        ProtocolError, with nothing changed, for changes of a request that the snapshot does not have.
        """
        if infos or rows.number:
            RequestMirror().apply(infos, rows, time_ns=time_ns)
        if same_epoch:
            self._end_missing({info.number for info in infos}, time_ns)
            for group in self._tables.keys() - {0}:
                self._lengths(group)[:] = 0  # a snapshot says nothing of those that are empty
        else:
            self._clear()
        self.apply(infos, rows, time_ns=time_ns)

    def apply(self, infos: Sequence[RequestInfo], rows: RequestRows, *, time_ns: int) -> None:
        """Add new requests, then change those in `rows`.

        Raises ProtocolError, with no row changed, for an unknown request or a table with a hole in it.
        """
        if infos:
            self._add(infos, time_ns)
        if not rows.number:
            return
        parts = split_by_group(rows) if rows.table_group else {0: rows}
        for group in parts.keys() - self._tables.keys():
            self._add_group(group)
        changes = {group: read_changes(part, self.number, self._lengths(group)) for group, part in parts.items()}
        num_ended = sum(self._change(change, time_ns, group) for group, change in changes.items())
        if num_ended:
            self._drop_oldest_finished()

    def _add_group(self, group: int) -> None:
        self._data[_length_name(group)] = np.zeros(len(self._data["number"]), np.int32)
        self._tables[group] = BlockTableBuffer(len(self))

    def _add(self, infos: Sequence[RequestInfo], time_ns: int) -> None:
        fresh = self._unknown(infos)
        if not fresh:
            return
        is_append = not len(self) or fresh[0].number > int(self.number[-1])
        start = len(self)
        self._grow_to(start + len(fresh))
        self._fill(start, fresh, time_ns)
        if not is_append:
            self._keep(np.argsort(self.number, kind="stable"))

    def _unknown(self, infos: Sequence[RequestInfo]) -> list[RequestInfo]:
        """In order of number, once each. One that is told again, as a snapshot does, has nothing new about it."""
        by_number = {info.number: info for info in infos}
        numbers = np.array(sorted(by_number), np.int64)
        if len(self):
            at = np.minimum(np.searchsorted(self.number, numbers), len(self) - 1)
            numbers = numbers[self.number[at] != numbers]
        return [by_number[number] for number in numbers.tolist()]

    def _fill(self, start: int, infos: Sequence[RequestInfo], time_ns: int) -> None:
        columns = zip(*map(_TOLD, infos), strict=True)
        for name, column in zip(_TOLD_COLUMNS, columns, strict=True):
            self._data[name][start : start + len(infos)] = column
        self.first_seen_ns[start:] = time_ns
        self.finished_ns[start:] = -1
        self.request_ids.extend([info.request_id for info in infos])
        self.adapters.extend([info.adapter for info in infos])
        for tables in self._tables.values():
            tables.append_rows(len(infos))

    def _change(self, changes: RequestRowColumns, time_ns: int, group: int) -> int:
        """How many ended by it."""
        before = self.state[changes.rows]
        ended = changes.rows[(changes.state == RequestState.FINISHED) & (before != RequestState.FINISHED)]
        self.finished_ns[ended] = time_ns
        self.state[changes.rows] = changes.state
        self.num_computed_tokens[changes.rows] = changes.num_computed_tokens
        self.num_cached_tokens[changes.rows] = changes.num_cached_tokens
        self.num_output_tokens[changes.rows] = changes.num_output_tokens
        self.num_preemptions[changes.rows] = changes.num_preemptions
        self.num_draft_tokens[changes.rows] = changes.num_draft_tokens
        self.num_accepted_tokens[changes.rows] = changes.num_accepted_tokens
        self.waits_for[changes.rows] = changes.waits_for
        self._write_tables(changes, group)
        self._lengths(group)[changes.rows] = changes.table_end
        return len(ended)

    def _write_tables(self, changes: RequestRowColumns, group: int) -> None:
        counts = changes.table_end - changes.table_start
        filled = np.flatnonzero(counts)  # a token more seldom needs a block more
        if filled.size:
            rows, starts = changes.rows[filled], changes.table_start[filled]
            self._tables[group].write(self._lengths(group), rows, starts, counts[filled], changes.table_blocks)

    def _end_missing(self, present: set[int], time_ns: int) -> None:
        going_on = np.flatnonzero(self.state != RequestState.FINISHED)
        missing = [row for row in going_on.tolist() if int(self.number[row]) not in present]
        self.state[missing] = RequestState.FINISHED
        self.finished_ns[missing] = time_ns
        for group in self._tables:
            self._lengths(group)[missing] = 0

    def _drop_oldest_finished(self) -> None:
        """Down to the bound once it is passed by a quarter, so that rows move seldom."""
        finished = np.flatnonzero(self.state == RequestState.FINISHED)
        if len(finished) <= self.max_finished + max(16, self.max_finished // 4):
            return
        keep = np.ones(len(self), np.bool_)
        keep[finished[: len(finished) - self.max_finished]] = False
        self._keep(np.flatnonzero(keep))

    def _keep(self, order: npt.NDArray[np.intp]) -> None:
        """Keep the rows `order`, in that order."""
        for name, column in self._data.items():
            self._data[name][: len(order)] = column[: len(self)][order]
        rows = order.tolist()
        self.request_ids = [self.request_ids[row] for row in rows]
        self.adapters = [self.adapters[row] for row in rows]
        for tables in self._tables.values():
            tables.keep(order)
        self.layout += 1
        self._expose(len(rows))

    def _clear(self) -> None:
        self._data = {name: np.zeros(_FIRST_CAPACITY, dtype) for name, dtype in REQUEST_COLUMNS.items()}
        self._tables = {0: BlockTableBuffer()}
        self.request_ids = []
        self.adapters = []
        self.layout += 1
        self._expose(0)

    def _grow_to(self, num_rows: int) -> None:
        if num_rows > len(self._data["number"]):
            for name, column in self._data.items():
                self._data[name] = np.concatenate([column, np.zeros(num_rows, column.dtype)])
        for column in self._data.values():  # rows that were dropped leave values behind
            column[len(self) : num_rows] = 0
        self._expose(num_rows)

    def _expose(self, num_rows: int) -> None:
        for name in REQUEST_COLUMNS:
            setattr(self, name, self._data[name][:num_rows])


def equal_requests(left: RequestMirror, right: RequestMirror, columns: Iterable[str]) -> bool:
    """Whether both hold the same requests with the same tables and the same `columns`."""
    return (
        left.request_ids == right.request_ids
        and left.adapters == right.adapters
        and all(np.array_equal(getattr(left, name), getattr(right, name)) for name in columns)
        and all(
            np.array_equal(left.table(n, group), right.table(n, group))
            for group in {*left.groups, *right.groups}
            for n in left.number.tolist()
        )
    )


@dataclass(frozen=True, slots=True)
class RequestRowColumns:
    """`RequestRows` as numpy columns, checked against the rows they change.

    Owns the one rule of block tables on the wire: a table becomes `table[:table_start]` and the blocks that
    follow, so `table_start` may not lie past its end. Changes nothing itself.

    Changes in the order they happened, each column shape `(n,)`; a row may occur more than once.
    """

    rows: npt.NDArray[np.intp]
    state: npt.NDArray[np.uint8]
    num_computed_tokens: npt.NDArray[np.uint32]
    num_cached_tokens: npt.NDArray[np.uint32]
    num_output_tokens: npt.NDArray[np.uint32]
    num_preemptions: npt.NDArray[np.uint16]
    num_draft_tokens: npt.NDArray[np.uint32]
    num_accepted_tokens: npt.NDArray[np.uint32]
    waits_for: npt.NDArray[np.uint32]
    table_start: npt.NDArray[np.int64]
    table_end: npt.NDArray[np.int64]
    table_blocks: npt.NDArray[np.int32]


def read_changes(
    rows: RequestRows, numbers: npt.NDArray[np.int64], num_blocks: npt.NDArray[np.int32]
) -> RequestRowColumns:
    """The changes in `rows` of the requests `numbers` (ascending), whose tables have `num_blocks` blocks.

    Raises ProtocolError for a request that is not among them, and for a table with a hole.
    """
    at = _rows_of(np.frombuffer(rows.number, "<u4").astype(np.int64), numbers)
    start = np.frombuffer(rows.table_start, "<u4").astype(np.int64)
    end = start + np.frombuffer(rows.table_count, "<u4")
    before = _lengths_before(at, end, num_blocks)
    if (start > before).any():
        first = int(np.argmax(start > before))
        raise ProtocolError(
            f"block table of request {numbers[at[first]]} goes on at {start[first]}, but has {before[first]} blocks"
        )
    return RequestRowColumns(
        rows=at,
        state=np.frombuffer(rows.state, "u1"),
        num_computed_tokens=np.frombuffer(rows.num_computed_tokens, "<u4"),
        num_cached_tokens=np.frombuffer(rows.num_cached_tokens, "<u4"),
        num_output_tokens=np.frombuffer(rows.num_output_tokens, "<u4"),
        num_preemptions=np.frombuffer(rows.num_preemptions, "<u2"),
        num_draft_tokens=_counts(rows.num_draft_tokens, at.size),
        num_accepted_tokens=_counts(rows.num_accepted_tokens, at.size),
        waits_for=_counts(rows.waits_for, at.size),
        table_start=start,
        table_end=end,
        table_blocks=np.frombuffer(rows.table_blocks, "<u4").astype(np.int32),
    )


def split_by_group(rows: RequestRows) -> dict[int, RequestRows]:
    """The rows of each KV group, in their order. Raises ProtocolError for a group above `MAX_GROUP`."""
    groups = np.frombuffer(rows.table_group, "<u4")
    if groups.max() > MAX_GROUP:
        raise ProtocolError(f"block table of KV group {groups.max()}: at most {MAX_GROUP} is accepted")
    columns = {name: np.frombuffer(getattr(rows, name), dtype) for name, dtype in _ROW_TYPES.items()}
    entries = np.repeat(groups, columns["table_count"]), np.frombuffer(rows.table_blocks, "<u4")
    return {
        group: RequestRows(
            **{name: column[groups == group].tobytes() for name, column in columns.items() if column.size},
            table_blocks=entries[1][entries[0] == group].tobytes(),
        )
        for group in np.unique(groups).tolist()
    }


def _counts(packed: bytes, num_rows: int) -> npt.NDArray[np.uint32]:
    return np.frombuffer(packed, "<u4") if packed else np.zeros(num_rows, np.uint32)


def _rows_of(wanted: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    if not len(numbers):
        raise ProtocolError(f"request {wanted[0]} changed, but was never announced")
    at = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    unknown = numbers[at] != wanted
    if unknown.any():
        raise ProtocolError(f"request {wanted[int(np.argmax(unknown))]} changed, but was never announced")
    return at


def _lengths_before(
    at: npt.NDArray[np.intp], end: npt.NDArray[np.int64], num_blocks: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Length of each table before its change: that after the request's previous change, or the present."""
    # Of short integers it takes a tenth of the time: they are sorted by their digits.
    order = np.argsort(at.astype(np.uint16) if len(num_blocks) <= 1 << 16 else at, kind="stable")
    sorted_rows = at[order]
    lengths = num_blocks[sorted_rows].astype(np.int64)
    again = np.flatnonzero(sorted_rows[1:] == sorted_rows[:-1])
    lengths[again + 1] = end[order][again]
    before = np.empty_like(lengths)
    before[order] = lengths
    return before


class BlockTableBuffer:
    """The block tables of many rows side by side in one buffer, so that any number of changes is written in a few
    calls.

    Owns where each row's entries lie and how much room they have. Must not know how long a table is, nor whose it
    is: the lengths are given. A row that outgrows its room moves to the end of the buffer, where it has twice as
    much; the holes go when the buffer is full.

    `num_rows` rows, all empty at first.
    """

    def __init__(self, num_rows: int = 0) -> None:
        self._entries = np.empty(0, np.int32)
        self._end = 0  # of what is given out of the entries
        self._begin = np.zeros(num_rows, np.int64)
        self._room = np.zeros(num_rows, np.int64)

    @property
    def num_bytes(self) -> int:
        """Memory of the buffer."""
        return self._entries.nbytes

    def first(self, row: int, length: int) -> npt.NDArray[np.int32]:
        """The first `length` entries of a row: a view until the next `write`."""
        begin = int(self._begin[row])
        return self._entries[begin : begin + length]

    def num_below(self, limit: int, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """How many of the first `lengths` entries of each row are less than `limit`, shape `(num_rows,)`."""
        ends = np.cumsum(lengths, dtype=np.int64)
        at = np.arange(int(ends[-1]) if ends.size else 0) + np.repeat(self._begin - (ends - lengths), lengths)
        sums = np.concatenate(([0], np.cumsum(self._entries[at] < limit)))
        below: npt.NDArray[np.int32] = (sums[ends] - sums[ends - lengths]).astype(np.int32)
        return below

    def append_rows(self, num_rows: int) -> None:
        """So many rows more, empty."""
        none = np.zeros(num_rows, np.int64)
        self._begin, self._room = np.concatenate((self._begin, none)), np.concatenate((self._room, none))

    def keep(self, order: npt.NDArray[np.intp]) -> None:
        """Keep the rows `order`, in that order."""
        self._begin, self._room = self._begin[order], self._room[order]

    def write(
        self,
        lengths: npt.NDArray[np.int32],
        rows: npt.NDArray[np.intp],
        starts: Ints,
        counts: Ints,
        blocks: npt.NDArray[np.int32],
    ) -> None:
        """Write `counts` of `blocks` from entry `starts` of `rows` on, each shape (n,), in order: the later stands.

        `lengths`, one a row: how many entries of each count for something until now.
        """
        self._make_room(lengths, rows, starts + counts)
        ends = np.cumsum(counts)
        at = np.repeat(self._begin[rows] + starts - (ends - counts), counts)
        self._entries[at + np.arange(at.size)] = blocks

    def _make_room(self, lengths: npt.NDArray[np.int32], rows: npt.NDArray[np.intp], ends: Ints) -> None:
        if not (ends > self._room[rows]).any():
            return
        needed = np.zeros(self._room.size, np.int64)
        np.maximum.at(needed, rows, ends)
        growing = np.flatnonzero(needed > self._room)
        room = self._more_room(needed, growing)
        if self._end + int(room.sum()) > self._entries.size:
            changing = needed[needed > 0]
            self._pack(lengths, int(np.maximum(2 * changing, _LEAST_ROOM).sum()))
            growing = np.flatnonzero(needed > self._room)  # more than before: no row has room to spare
            room = self._more_room(needed, growing)
        begin = self._end + np.cumsum(room) - room
        self._copy(self._entries, growing, lengths[growing], begin)
        self._begin[growing], self._room[growing] = begin, room
        self._end += int(room.sum())

    def _more_room(self, needed: Ints, growing: npt.NDArray[np.intp]) -> Ints:
        return np.maximum(np.maximum(needed[growing], 2 * self._room[growing]), _LEAST_ROOM)

    def _pack(self, lengths: npt.NDArray[np.int32], num_more: int) -> None:
        """Into a new buffer without holes, with room for `num_more` entries and as many again."""
        room = lengths.astype(np.int64)
        used = int(room.sum())
        entries = np.empty(max(_FIRST_ENTRIES, 2 * (used + num_more)), np.int32)
        begin = np.cumsum(room) - room
        self._copy(entries, np.arange(room.size), room, begin)
        self._entries, self._begin, self._room, self._end = entries, begin, room, used

    def _copy(self, target: npt.NDArray[np.int32], rows: Ints, lengths: npt.ArrayLike, begin: Ints) -> None:
        """The first `lengths` entries of `rows` to where they begin in `target`."""
        counts = np.asarray(lengths, np.int64)
        ends = np.cumsum(counts)
        place = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        target[place + np.repeat(begin, counts)] = self._entries[place + np.repeat(self._begin[rows], counts)]
