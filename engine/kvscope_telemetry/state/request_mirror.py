"""The requests of a mirror: one numpy array a column, one row a request, rows in order of request number.

Owns the columns and how many ended requests are kept; their block tables lie in `BlockTables`. Applies changes by fancy
indexing, however many there are; Python loops only over requests that are new. Knows nothing of blocks but their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.messages.request_words import RequestState
from kvscope_telemetry.messages.telemetry import RequestInfo, RequestRows
from kvscope_telemetry.state.block_tables import BlockTables
from kvscope_telemetry.state.request_changes import RequestChanges, read_changes

MAX_FINISHED: Final = 10_000
"""Ended requests that are kept, the newest."""

REQUEST_COLUMNS: Final[dict[str, np.dtype[np.generic]]] = {
    "number": np.dtype(np.int64),  # ascending: the row order
    "state": np.dtype(np.uint8),  # RequestState
    "priority": np.dtype(np.int32),
    "index": np.dtype(np.int32),  # which of the n completions of a prompt
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
}
_TOLD_COLUMNS: Final = ("number", "priority", "index", "arrival_ns", "num_prompt_tokens", "max_tokens")
_TOLD: Final = attrgetter(*_TOLD_COLUMNS)
"""What is told once of a request, when it is new."""
_FIRST_CAPACITY: Final = 64


class RequestMirror:
    """All requests the engine told of. Attributes are the columns, each shape `(len(self),)`.

    The arrays are views: take them anew after each update. `layout` grows whenever rows moved or went.
    """

    number: npt.NDArray[np.int64]
    state: npt.NDArray[np.uint8]
    priority: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]
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

    def __init__(self, max_finished: int = MAX_FINISHED) -> None:
        self.max_finished = max_finished
        self.layout = 0
        self.request_ids: list[str] = []
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

    def table(self, number: int) -> npt.NDArray[np.int32]:
        """The block table of request `number`, shape `(num_blocks,)`, a copy; empty when it is not known."""
        row = self.row_of(number)
        return np.empty(0, np.int32) if row is None else self._held(row).copy()

    def pack(self, rows: npt.NDArray[np.intp], starts: npt.NDArray[np.int64]) -> RequestRows:
        """How the requests in `rows` stand, with their block tables from entry `starts` on, both shape (n,)."""
        tails = [self._held(row)[start:] for row, start in zip(rows.tolist(), starts.tolist(), strict=True)]

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
        )

    def _packed_if_any(self, name: str, rows: npt.NDArray[np.intp]) -> bytes:
        values = getattr(self, name)[rows]
        return bytes(values.astype("<u4").tobytes()) if values.any() else b""

    def holders(self, block: int, limit: int, first: int = 0) -> list[int]:
        """Requests whose block tables hold `block`, in order of number, at most `limit`. `first` is looked at first:
        with the owner there, a block that one request holds costs no search."""
        rows = np.flatnonzero(self.num_blocks > 0).tolist()
        row = self.row_of(first)
        ordered = rows if row is None else [row, *(other for other in rows if other != row)]
        found: list[int] = []
        for candidate in ordered:
            if len(found) == limit:
                break
            if np.any(self._held(candidate) == block):
                found.append(int(self.number[candidate]))
        return sorted(found)

    def index_in_table(self, number: int, block: int) -> int | None:
        """Where `block` is in the block table of request `number`, None when it is not there."""
        row = self.row_of(number)
        if row is None:
            return None
        at = np.flatnonzero(self._held(row) == block)
        return int(at[0]) if at.size else None

    def _held(self, row: int) -> npt.NDArray[np.int32]:
        """The block table of a row, no copy."""
        return self._tables.first(row, int(self.num_blocks[row]))

    def reset(self, infos: Sequence[RequestInfo], rows: RequestRows, *, time_ns: int, same_epoch: bool) -> None:
        """Replace what is known by a snapshot's unfinished requests.

        Within an epoch, ended requests stay, and one that the snapshot no longer has ended unseen. Raises
        ProtocolError, with nothing changed, for changes of a request that the snapshot does not have.
        """
        if infos or rows.number:
            RequestMirror().apply(infos, rows, time_ns=time_ns)
        if same_epoch:
            self._end_missing({info.number for info in infos}, time_ns)
        else:
            self._clear()
        self.apply(infos, rows, time_ns=time_ns)

    def apply(self, infos: Sequence[RequestInfo], rows: RequestRows, *, time_ns: int) -> None:
        """Add new requests, then change those in `rows`.

        Raises ProtocolError, with no row changed, for an unknown request or a table with a hole in it.
        """
        if infos:
            self._add(infos, time_ns)
        if rows.number:
            self._change(read_changes(rows, self.number, self.num_blocks), time_ns)

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
        self._tables.append_rows(len(infos))

    def _change(self, changes: RequestChanges, time_ns: int) -> None:
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
        self._write_tables(changes)
        self.num_blocks[changes.rows] = changes.table_end
        if len(ended):
            self._drop_oldest_finished()

    def _write_tables(self, changes: RequestChanges) -> None:
        counts = changes.table_end - changes.table_start
        told = np.flatnonzero(counts)  # a token more seldom needs a block more
        if told.size:
            rows, starts = changes.rows[told], changes.table_start[told]
            self._tables.write(self.num_blocks, rows, starts, counts[told], changes.table_blocks)

    def _end_missing(self, present: set[int], time_ns: int) -> None:
        going_on = np.flatnonzero(self.state != RequestState.FINISHED)
        missing = [row for row in going_on.tolist() if int(self.number[row]) not in present]
        self.state[missing] = RequestState.FINISHED
        self.finished_ns[missing] = time_ns
        self.num_blocks[missing] = 0

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
        self._tables.keep(order)
        self.layout += 1
        self._expose(len(rows))

    def _clear(self) -> None:
        self._data = {name: np.zeros(_FIRST_CAPACITY, dtype) for name, dtype in REQUEST_COLUMNS.items()}
        self._tables = BlockTables()
        self.request_ids = []
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
        for name, column in self._data.items():
            setattr(self, name, column[:num_rows])


def equal_requests(left: RequestMirror, right: RequestMirror, columns: Iterable[str]) -> bool:
    """Whether both hold the same requests with the same tables and the same `columns`."""
    return (
        left.request_ids == right.request_ids
        and all(np.array_equal(getattr(left, name), getattr(right, name)) for name in columns)
        and all(np.array_equal(left.table(n), right.table(n)) for n in left.number.tolist())
    )
