"""The block tables of many rows side by side in one buffer, so that any number of changes is written in a few calls.

Owns where each row's entries lie and how much room they have. Must not know how long a table is, nor whose it is: the
lengths are given. A row that outgrows its room moves to the end of the buffer, where it has twice as much; the holes go
when the buffer is full.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_LEAST_ROOM: Final = 8
_FIRST_ENTRIES: Final = 1024


class BlockTables:
    """`num_rows` rows, all empty at first."""

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
