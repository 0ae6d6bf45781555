"""History of one block: each change of its ledger row, with the time and the request that received the block.

Extracts the changes from messages, and limits their number (the newest are retained). Between two changes, the block
has the values of the first. Must not depend on files or create texts for the user.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import COLUMNS, DENSE, LASTING, NO_OWNER, BlockRows, Ledger, parent_at
from kvscope_telemetry.messages.telemetry import Frame, Moves, RequestRows, Snapshot, TelemetryMessage
from kvscope_telemetry.mirror.state_continuity import Continuity
from kvscope_telemetry.source import Update

MAX_ROWS: Final = 20_000


class ChangeKind(IntEnum):
    """How the values of a row of a block's history became known."""

    CHANGED = 0
    """A frame reported the values."""
    KNOWN = 1
    """A snapshot or mirror contained the values; the block's earlier values are unknown."""
    LOST = 2
    """The values are unknown from here on: frames are missing, or the block was not watched."""


class Moved(IntFlag):
    """The lists of a frame's `messages.telemetry.Moves` that contain the block, as flags. Stored in each row of
    a block's history.
    """

    EVICTED = 1
    COPIED = 2
    SAVED = 4
    LOADED = 8


HISTORY_DTYPE: Final = np.dtype(
    [
        ("time_ns", "<i8"),  # wall clock
        ("epoch", "<i8"),
        ("step", "<i8"),
        ("how", "u1"),
        ("moved", "u1"),
        ("taker", "<i4"),  # request whose block table received the block in this frame, or NO_OWNER
        *((name, COLUMNS[name]) for name in LASTING),
    ]
)
"""Dtype of a row of a block's history: when the block changed, how its values became known (`ChangeKind`), how it was
moved (`Moved`), and its values in the ledger's columns `LASTING`.
"""
_MOVES: Final = {name: flag for flag in Moved if (name := str(flag.name).lower())}
_NOTHING: Final = (0,) * len(LASTING)
assert (*DENSE, "parent") == LASTING, "`_row` knows no other order"
Rows = npt.NDArray[np.void]


class BlockChanges:
    """Collects the history of `block` from messages (`feed`) or updates (`add_update`). Only the newest
    `max_rows` changes are retained.
    """

    def __init__(self, block: int, max_rows: int = MAX_ROWS) -> None:
        self.block = block
        self.needle = int(block).to_bytes(4, "little")
        """The block's id as packed in messages, for a fast search."""
        self.num_forgotten = 0
        self._max_rows = max_rows
        self._data = np.zeros(64, HISTORY_DTYPE)
        self._size = 0
        self._last: tuple[int, ...] = _NOTHING
        self._continuity = Continuity()

    @property
    def rows(self) -> Rows:
        """History rows, oldest first, shape (n,) of `HISTORY_DTYPE`."""
        return self._data[: self._size]

    @property
    def is_lost(self) -> bool:
        """Whether messages are ignored until the next snapshot, because frames are missing."""
        return self._continuity.is_lost

    @property
    def seq(self) -> int:
        return self._continuity.seq

    def feed(self, message: TelemetryMessage, time_ns: int) -> None:
        if isinstance(message, Snapshot):
            if self._continuity.accepts(message):
                self._add_known(message, time_ns)
        elif isinstance(message, Frame):
            was_lost = self.is_lost
            if self._continuity.accepts(message):
                self._change(message, time_ns)
            elif self.is_lost and not was_lost:
                self.mark_lost(time_ns)

    def start_at(self, time_ns: int) -> None:
        """Drop the history so far, and retain only the current values as the state at `time_ns`."""
        if self._size:
            self._data[0] = self._data[self._size - 1]
            first = self._data[0]
            first["time_ns"], first["moved"], first["taker"] = time_ns, 0, NO_OWNER
            if first["how"] != ChangeKind.LOST:
                first["how"] = ChangeKind.KNOWN
            self._size, self.num_forgotten = 1, 0

    def add_known(self, ledger: Ledger, time_ns: int, epoch: int, step: int) -> None:
        if self.block >= ledger.num_blocks:
            self.mark_lost(time_ns)
            return
        values = tuple(int(getattr(ledger, name)[self.block]) for name in LASTING)
        self._add(time_ns, epoch, step, values, how=ChangeKind.KNOWN)

    def mark_lost(self, time_ns: int) -> None:
        if self._size:
            self._add(time_ns, int(self._data["epoch"][self._size - 1]), 0, _NOTHING, how=ChangeKind.LOST)

    def add_update(self, update: Update, wall_offset_ns: int) -> None:
        """Process a source's update. `wall_offset_ns` converts engine times of the update to the wall clock."""
        if not update.series:
            return
        indices = np.flatnonzero(update.block_ids == self.block).tolist()
        moved = sum(flag for name, flag in _MOVES.items() if (getattr(update, name) == self.block).any())
        if not indices and not moved:
            return
        taker = _taker(update.requests, self.needle)
        for index in indices or [-1]:
            values = self._last if index < 0 else tuple(int(update.block_columns[name][index]) for name in LASTING)
            time_ns, step = _frame_of(update, values[_LAST_USED])
            epoch = int(self._data["epoch"][self._size - 1]) if self._size else 0
            self._add(time_ns + wall_offset_ns, epoch, step, values, moved=moved, taker=taker)
            moved = 0

    def _add_known(self, snapshot: Snapshot, time_ns: int) -> None:
        if self.block >= len(snapshot.blocks.state):
            self.mark_lost(time_ns)
            return
        values = _row(snapshot.blocks, self.block)
        self._add(time_ns, snapshot.hello.epoch, snapshot.step, values, how=ChangeKind.KNOWN)

    def _change(self, frame: Frame, time_ns: int) -> None:
        index = _find(frame.blocks.ids, self.needle)
        moved = _moves_of(frame.moves, self.needle)
        if index is None and not moved:
            return
        values = self._last if index is None else _row(frame.blocks, index)
        taker = _taker((frame.requests,), self.needle)
        self._add(time_ns, frame.epoch, frame.step, values, moved=moved, taker=taker)

    def _add(
        self,
        time_ns: int,
        epoch: int,
        step: int,
        values: tuple[int, ...],
        *,
        how: ChangeKind = ChangeKind.CHANGED,
        moved: int = 0,
        taker: int = NO_OWNER,
    ) -> None:
        if how is ChangeKind.CHANGED and not moved and self._size and values == self._last:
            return  # repeated without a change
        if self._size == self._max_rows:
            self._drop(self._max_rows // 4)
        if self._size == self._data.size:
            self._data = np.concatenate((self._data, np.zeros_like(self._data)))
        if self._size:  # time does not go back
            time_ns = max(time_ns, int(self._data["time_ns"][self._size - 1]))
        self._data[self._size] = (time_ns, epoch, step, how, moved, taker, *values)
        self._size, self._last = self._size + 1, values

    def _drop(self, count: int) -> None:
        self._data[: self._size - count] = self._data[count : self._size].copy()
        self._size -= count
        self.num_forgotten += count
        if self._data["how"][0] == ChangeKind.CHANGED:
            self._data["how"][0] = ChangeKind.KNOWN


_LAST_USED: Final = LASTING.index("last_used_step")


def _find(ids: bytes, needle: bytes) -> int | None:
    """Return the index of the last occurrence of `needle` (a packed u32) in the packed `ids`, or None."""
    offset = ids.rfind(needle)
    while offset % 4 and offset > 0:
        offset = ids.rfind(needle, 0, offset + 3)
    return None if offset < 0 or offset % 4 else offset // 4


def _row(blocks: BlockRows, index: int) -> tuple[int, ...]:
    """Return the values of the block at `index` in the order of `LASTING`. The column `parent` is packed
    differently from the others.
    """
    return (*(_value(blocks, name, index) for name in DENSE), parent_at(blocks, index))


def _value(blocks: BlockRows, name: str, index: int) -> int:
    dtype = COLUMNS[name]
    return int(np.frombuffer(getattr(blocks, name), dtype, count=1, offset=index * dtype.itemsize)[0])


def _moves_of(moves: Moves, needle: bytes) -> int:
    return sum(flag for name, flag in _MOVES.items() if _find(getattr(moves, name), needle) is not None)


def _taker(changes: tuple[RequestRows, ...], needle: bytes) -> int:
    """Return the number of the last request in `changes` whose block table received the block, or NO_OWNER."""
    for rows in reversed(changes):
        index = _find(rows.table_blocks, needle)
        if index is not None:
            ends = np.cumsum(np.frombuffer(rows.table_count, "<u4"))
            return int(np.frombuffer(rows.number, "<u4")[int(np.searchsorted(ends, index, "right"))])
    return NO_OWNER


def _frame_of(update: Update, step: int) -> tuple[int, int]:
    """Return the engine time and step number of the frame in `update` that completed `step`, or of the update's
    last frame if there is none.
    """
    steps = update.series["step"]
    index = int(np.searchsorted(steps, step))
    index = index if index < steps.size and steps[index] == step else steps.size - 1
    return int(update.series["time_ns"][index]), int(steps[index])
