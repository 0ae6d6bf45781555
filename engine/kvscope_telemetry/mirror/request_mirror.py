"""The requests of a mirror: one numpy array per column, one row per request, in order of request number.

Owns the columns and the limit on retained finished requests; their block tables are stored in a `BlockTableBuffer`.
Applies any number of changes by fancy indexing; Python loops only over new requests. Blocks are only ids here.
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

_MIN_CAPACITY: Final = 8
_FIRST_ENTRIES: Final = 1024
MAX_FINISHED: Final = 10_000
"""Maximum number of retained finished requests; the oldest are dropped."""

REQUEST_COLUMNS: Final[dict[str, np.dtype[np.generic]]] = {
    "number": np.dtype(np.int64),  # ascending: the row order
    "state": np.dtype(np.uint8),  # RequestState
    "priority": np.dtype(np.int32),
    "index": np.dtype(np.int32),  # index among the n completions of a prompt
    "client": np.dtype(np.int64),  # number of the client that sent it, 0: unknown
    "arrival_ns": np.dtype(np.int64),  # engine's monotonic clock
    "first_seen_ns": np.dtype(np.int64),  # newest frame's time in the update that added it
    "finished_ns": np.dtype(np.int64),  # the same for its end, -1 before
    "num_prompt_tokens": np.dtype(np.int64),
    "max_tokens": np.dtype(np.int64),
    "num_computed_tokens": np.dtype(np.int64),
    "num_cached_tokens": np.dtype(np.int64),
    "num_output_tokens": np.dtype(np.int64),
    "num_preemptions": np.dtype(np.int32),
    "num_draft_tokens": np.dtype(np.int64),  # speculative tokens verified
    "num_accepted_tokens": np.dtype(np.int64),  # speculative tokens accepted
    "num_blocks": np.dtype(np.int32),  # length of the block table
    "waits_for": np.dtype(np.uint8),  # WaitsFor
}
_SENT_COLUMNS: Final = ("number", "priority", "index", "client", "arrival_ns", "num_prompt_tokens", "max_tokens")
_SENT_VALUES: Final = attrgetter(*_SENT_COLUMNS)
_FIRST_CAPACITY: Final = 64
_NUM_SEARCHED: Final = 2_000
"""Maximum number of requests, newest first, that a search for a request id inspects."""
MAX_GROUP: Final = 255
"""Maximum index of a KV group, which the ledger stores in a byte."""
_ROW_TYPES: Final = {
    name: packing.dtype
    for name, kind in get_type_hints(RequestRows, include_extras=True).items()
    if name != "table_group" and (packing := packing_of(kind)) is not None and packing.is_row
}
"""dtype of each column of `RequestRows` with one number per row."""


def _length_name(group: int) -> str:
    return f"num_blocks of group {group}" if group else "num_blocks"


class RequestMirror:
    """All requests that the engine reported. Attributes are the columns, each of shape `(len(self),)`.

    The arrays are views, which must be read again after each update. `layout` is incremented when rows are moved or
    removed.
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
        """Entries of block tables with a value below this number are placeholders for no block
        (`CacheInfo.num_reserved_blocks`).
        """
        self.group_of_states = -1
        """Index of the KV group with recurrent states instead of blocks in its tables (`CacheInfo.group_of_states`)."""
        self.layout = 0
        self.request_ids: list[str] = []
        self.adapters: list[str] = []
        """Name of the LoRA adapter of each request, by row; empty for the base model."""
        self._clear()

    def __len__(self) -> int:
        return len(self.request_ids)

    def row_of(self, number: int) -> int | None:
        """Return the row of request `number`; None if it is unknown or was dropped."""
        row = int(np.searchsorted(self.number, number))
        return row if row < len(self) and int(self.number[row]) == number else None

    def request_id(self, number: int) -> str:
        """Return the client's id for request `number`; empty if it is unknown."""
        row = self.row_of(number)
        return "" if row is None else self.request_ids[row]

    def newest_with(self, request_id: str) -> int:
        """Return the number of the newest request with an id that contains `request_id`; 0 if there is none.

        Servers derive their ids from those of clients, so the ids need not be equal.
        """
        rows = range(len(self) - 1, max(-1, len(self) - 1 - _NUM_SEARCHED), -1)
        return next((int(self.number[row]) for row in rows if request_id in self.request_ids[row]), 0)

    def table(self, number: int, group: int = 0) -> npt.NDArray[np.int32]:
        """Return a copy of the block table of request `number` in a KV group, shape (n,); empty if it is unknown."""
        row = self.row_of(number)
        return np.empty(0, np.int32) if row is None or group not in self._tables else self.held(row, group).copy()

    def blocks(self, number: int, group: int | None = None) -> npt.NDArray[np.int32]:
        """Return the ids of a request's blocks without placeholder entries, shape (n,).

        They are in the order of the request's block table of `group`, or of its tables of all groups, concatenated.
        """
        groups = self._tables if group is None else (group,)
        entries = np.concatenate([self.table(number, table_group) for table_group in groups])
        return entries[entries >= self.num_reserved]

    @property
    def num_held(self) -> npt.NDArray[np.int32]:
        """Number of blocks of each request, without recurrent states, shape `(len(self),)`."""
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
        """Indices of the KV groups with block tables. The first group is always included; the column
        `num_blocks` has the lengths of its tables.
        """
        return list(self._tables)

    def pack(self, rows: npt.NDArray[np.intp], starts: npt.NDArray[np.int64]) -> RequestRows:
        """Pack the requests in `rows`, with their block tables.

        The tables of the first KV group are packed from entry `starts` on, those of other groups completely. Both
        arguments have shape (n,).
        """
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
        """Return the numbers of at most `limit` requests with `block` in their block tables, ascending.

        Request `first` is checked first: if it is the owner and `limit` is 1, no other request is searched.
        """
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

    def index_in_tables(self, number: int, block: int) -> tuple[int, int] | None:
        """Return the KV group and the index of a block in a request's tables; None if it is in none of them."""
        row = self.row_of(number)
        if row is None:
            return None
        for group in self._tables:
            indices = np.flatnonzero(self.held(row, group) == block)
            if indices.size:
                return group, int(indices[0])
        return None

    def held(self, row: int, group: int) -> npt.NDArray[np.int32]:
        """Return the block table of the request at index `row` in a KV group, as a view."""
        return self._tables[group].first(row, int(self._lengths(group)[row]))

    def _lengths(self, group: int) -> npt.NDArray[np.int32]:
        """Return a writable view of the lengths of all requests' block tables in a KV group, shape `(len(self),)`."""
        lengths: npt.NDArray[np.int32] = self._data[_length_name(group)][: len(self)]
        return lengths

    def reset(self, infos: Sequence[RequestInfo], rows: RequestRows, *, time_ns: int, same_epoch: bool) -> None:
        """Replace the unfinished requests with those of a snapshot.

        Within an epoch, finished requests are retained, and requests missing in the snapshot are marked as finished.
        Raises ProtocolError, with nothing changed, for changes of a request that is not in the snapshot.
        """
        if infos or rows.number:
            RequestMirror().apply(infos, rows, time_ns=time_ns)
        if same_epoch:
            self._end_missing({info.number for info in infos}, time_ns)
            for group in self._tables.keys() - {0}:
                self._lengths(group)[:] = 0  # snapshots omit empty tables of these groups
        else:
            self._clear()
        self.apply(infos, rows, time_ns=time_ns)

    def apply(self, infos: Sequence[RequestInfo], rows: RequestRows, *, time_ns: int) -> None:
        """Add new requests, then apply the changes in `rows`.

        Raises ProtocolError, with no row changed, for an unknown request or a table with a gap.
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
        new_infos = self._without_row(infos)
        if not new_infos:
            return
        is_append = not len(self) or new_infos[0].number > int(self.number[-1])
        start = len(self)
        self._resize(start + len(new_infos))
        self._fill(start, new_infos, time_ns)
        if not is_append:
            self._select_rows(np.argsort(self.number, kind="stable"))

    def _without_row(self, infos: Sequence[RequestInfo]) -> list[RequestInfo]:
        """Return the requests in `infos` that have no row yet, each once, in order of number. Snapshots repeat known
        requests.
        """
        by_number = {info.number: info for info in infos}
        numbers = np.array(sorted(by_number), np.int64)
        if len(self):
            at = np.minimum(np.searchsorted(self.number, numbers), len(self) - 1)
            numbers = numbers[self.number[at] != numbers]
        return [by_number[number] for number in numbers.tolist()]

    def _fill(self, start: int, infos: Sequence[RequestInfo], time_ns: int) -> None:
        columns = zip(*map(_SENT_VALUES, infos), strict=True)
        for name, column in zip(_SENT_COLUMNS, columns, strict=True):
            self._data[name][start : start + len(infos)] = column
        self.first_seen_ns[start:] = time_ns
        self.finished_ns[start:] = -1
        self.request_ids.extend([info.request_id for info in infos])
        self.adapters.extend([info.adapter for info in infos])
        for tables in self._tables.values():
            tables.append_rows(len(infos))

    def _change(self, changes: RequestRowColumns, time_ns: int, group: int) -> int:
        """Apply `changes` of one KV group. Returns the number of requests that ended."""
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
        filled = np.flatnonzero(counts)  # a new token rarely needs a new block
        if filled.size:
            rows, starts = changes.rows[filled], changes.table_start[filled]
            self._tables[group].write(self._lengths(group), rows, starts, counts[filled], changes.table_blocks)

    def _end_missing(self, present: set[int], time_ns: int) -> None:
        unfinished = np.flatnonzero(self.state != RequestState.FINISHED)
        missing = [row for row in unfinished.tolist() if int(self.number[row]) not in present]
        self.state[missing] = RequestState.FINISHED
        self.finished_ns[missing] = time_ns
        for group in self._tables:
            self._lengths(group)[missing] = 0

    def _drop_oldest_finished(self) -> None:
        """Drop finished requests down to the limit, but only once it is exceeded by a quarter, so that rows are rarely
        moved.
        """
        finished = np.flatnonzero(self.state == RequestState.FINISHED)
        if len(finished) <= self.max_finished + max(16, self.max_finished // 4):
            return
        is_retained = np.ones(len(self), np.bool_)
        is_retained[finished[: len(finished) - self.max_finished]] = False
        self._select_rows(np.flatnonzero(is_retained))

    def _select_rows(self, order: npt.NDArray[np.intp]) -> None:
        for name, column in self._data.items():
            self._data[name][: len(order)] = column[: len(self)][order]
        rows = order.tolist()
        self.request_ids = [self.request_ids[row] for row in rows]
        self.adapters = [self.adapters[row] for row in rows]
        for tables in self._tables.values():
            tables.select_rows(order)
        self.layout += 1
        self._expose(len(rows))

    def _clear(self) -> None:
        self._data = {name: np.zeros(_FIRST_CAPACITY, dtype) for name, dtype in REQUEST_COLUMNS.items()}
        self._tables = {0: BlockTableBuffer()}
        self.request_ids = []
        self.adapters = []
        self.layout += 1
        self._expose(0)

    def _resize(self, num_rows: int) -> None:
        if num_rows > len(self._data["number"]):
            for name, column in self._data.items():
                self._data[name] = np.concatenate([column, np.zeros(num_rows, column.dtype)])
        for column in self._data.values():  # dropped rows leave stale values
            column[len(self) : num_rows] = 0
        self._expose(num_rows)

    def _expose(self, num_rows: int) -> None:
        for name in REQUEST_COLUMNS:
            setattr(self, name, self._data[name][:num_rows])


def equal_requests(left: RequestMirror, right: RequestMirror, columns: Iterable[str]) -> bool:
    """Return whether both mirrors have the same requests with equal tables and equal `columns`."""
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
    """`RequestRows` as numpy columns of shape `(n,)`, validated against the rows that they change.

    A table on the wire becomes `table[:table_start]` followed by the given blocks, so `table_start` must not exceed its
    length. Changes are in the order in which they happened, and a row may occur more than once.
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
    """Return the changes in `rows` for requests `numbers` (ascending), which have tables of `num_blocks` blocks.

    Raises ProtocolError for a request that is not in `numbers`, and for a table with a gap.
    """
    row_indices = _rows_of(np.frombuffer(rows.number, "<u4").astype(np.int64), numbers)
    start = np.frombuffer(rows.table_start, "<u4").astype(np.int64)
    end = start + np.frombuffer(rows.table_count, "<u4")
    before = _lengths_before(row_indices, end, num_blocks)
    if (start > before).any():
        first = int(np.argmax(start > before))
        raise ProtocolError(
            f"block table of request {numbers[row_indices[first]]}: an update starts at block {start[first]}, but the"
            f" table has only {before[first]} blocks"
        )
    return RequestRowColumns(
        rows=row_indices,
        state=np.frombuffer(rows.state, "u1"),
        num_computed_tokens=np.frombuffer(rows.num_computed_tokens, "<u4"),
        num_cached_tokens=np.frombuffer(rows.num_cached_tokens, "<u4"),
        num_output_tokens=np.frombuffer(rows.num_output_tokens, "<u4"),
        num_preemptions=np.frombuffer(rows.num_preemptions, "<u2"),
        num_draft_tokens=_counts(rows.num_draft_tokens, row_indices.size),
        num_accepted_tokens=_counts(rows.num_accepted_tokens, row_indices.size),
        waits_for=_counts(rows.waits_for, row_indices.size),
        table_start=start,
        table_end=end,
        table_blocks=np.frombuffer(rows.table_blocks, "<u4").astype(np.int32),
    )


def split_by_group(rows: RequestRows) -> dict[int, RequestRows]:
    """Return the rows of each KV group in their order. Raises ProtocolError for a group above `MAX_GROUP`."""
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
    row_indices = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    is_unknown = numbers[row_indices] != wanted
    if is_unknown.any():
        raise ProtocolError(f"request {wanted[int(np.argmax(is_unknown))]} changed, but was never announced")
    return row_indices


def _lengths_before(
    row_indices: npt.NDArray[np.intp], end: npt.NDArray[np.int64], num_blocks: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Return the length of each block table before its change.

    That is the length after the previous change of the same row, or the current length for the first change of a row.
    """
    # Sorting 16-bit integers takes a tenth of the time: numpy sorts them by radix.
    order = np.argsort(row_indices.astype(np.uint16) if len(num_blocks) <= 1 << 16 else row_indices, kind="stable")
    sorted_rows = row_indices[order]
    lengths = num_blocks[sorted_rows].astype(np.int64)
    repeated = np.flatnonzero(sorted_rows[1:] == sorted_rows[:-1])
    lengths[repeated + 1] = end[order][repeated]
    before = np.empty_like(lengths)
    before[order] = lengths
    return before


class BlockTableBuffer:
    """The block tables of many rows in one buffer, so that any number of changes is written in a few numpy calls.

    Owns each row's offset and capacity in the buffer; callers pass the lengths of tables. A row that outgrows its
    capacity moves to the end of the buffer, with twice the capacity. When the buffer is full, it is compacted.

    All `num_rows` rows are empty initially.
    """

    def __init__(self, num_rows: int = 0) -> None:
        self._entries = np.empty(0, np.int32)
        self._end = 0  # end of the allocated part of _entries
        self._begin = np.zeros(num_rows, np.int64)
        self._capacity = np.zeros(num_rows, np.int64)

    @property
    def num_bytes(self) -> int:
        return self._entries.nbytes

    def first(self, row: int, length: int) -> npt.NDArray[np.int32]:
        """Return the first `length` entries of a row, as a view that is valid until the next `write`."""
        begin = int(self._begin[row])
        return self._entries[begin : begin + length]

    def num_below(self, limit: int, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the number of entries less than `limit` among the first `lengths` of each row, shape `(num_rows,)`."""
        ends = np.cumsum(lengths, dtype=np.int64)
        at = np.arange(int(ends[-1]) if ends.size else 0) + np.repeat(self._begin - (ends - lengths), lengths)
        sums = np.concatenate(([0], np.cumsum(self._entries[at] < limit)))
        below: npt.NDArray[np.int32] = (sums[ends] - sums[ends - lengths]).astype(np.int32)
        return below

    def append_rows(self, num_rows: int) -> None:
        zeros = np.zeros(num_rows, np.int64)
        self._begin, self._capacity = np.concatenate((self._begin, zeros)), np.concatenate((self._capacity, zeros))

    def select_rows(self, order: npt.NDArray[np.intp]) -> None:
        self._begin, self._capacity = self._begin[order], self._capacity[order]

    def write(
        self,
        lengths: npt.NDArray[np.int32],
        rows: npt.NDArray[np.intp],
        starts: Ints,
        counts: Ints,
        blocks: npt.NDArray[np.int32],
    ) -> None:
        """Write `counts` entries of `blocks` to each of `rows` from entry `starts` on, in order: later writes override.

        `rows`, `starts` and `counts` have shape (n,). `lengths` has the number of valid entries of every row before the
        write.
        """
        self._reserve(lengths, rows, starts + counts)
        ends = np.cumsum(counts)
        offsets = np.repeat(self._begin[rows] + starts - (ends - counts), counts)
        self._entries[offsets + np.arange(offsets.size)] = blocks

    def _reserve(self, lengths: npt.NDArray[np.int32], rows: npt.NDArray[np.intp], ends: Ints) -> None:
        if not (ends > self._capacity[rows]).any():
            return
        needed = np.zeros(self._capacity.size, np.int64)
        np.maximum.at(needed, rows, ends)
        growing = np.flatnonzero(needed > self._capacity)
        capacity = self._grown_capacity(needed, growing)
        if self._end + int(capacity.sum()) > self._entries.size:
            changing = needed[needed > 0]
            self._pack(lengths, int(np.maximum(2 * changing, _MIN_CAPACITY).sum()))
            growing = np.flatnonzero(
                needed > self._capacity
            )  # more rows than before: after compaction, no row has spare capacity
            capacity = self._grown_capacity(needed, growing)
        begin = self._end + np.cumsum(capacity) - capacity
        self._copy(self._entries, growing, lengths[growing], begin)
        self._begin[growing], self._capacity[growing] = begin, capacity
        self._end += int(capacity.sum())

    def _grown_capacity(self, needed: Ints, growing: npt.NDArray[np.intp]) -> Ints:
        return np.maximum(np.maximum(needed[growing], 2 * self._capacity[growing]), _MIN_CAPACITY)

    def _pack(self, lengths: npt.NDArray[np.int32], num_more: int) -> None:
        """Move all entries to a new buffer without gaps. Its capacity is twice these entries plus `num_more`."""
        lengths_now = lengths.astype(np.int64)
        used = int(lengths_now.sum())
        entries = np.empty(max(_FIRST_ENTRIES, 2 * (used + num_more)), np.int32)
        begin = np.cumsum(lengths_now) - lengths_now
        self._copy(entries, np.arange(lengths_now.size), lengths_now, begin)
        self._entries, self._begin, self._capacity, self._end = entries, begin, lengths_now, used

    def _copy(self, target: npt.NDArray[np.int32], rows: Ints, lengths: npt.ArrayLike, begin: Ints) -> None:
        counts = np.asarray(lengths, np.int64)
        ends = np.cumsum(counts)
        offsets = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        target[offsets + np.repeat(begin, counts)] = self._entries[offsets + np.repeat(self._begin[rows], counts)]
