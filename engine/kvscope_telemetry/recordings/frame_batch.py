"""Stores the frames of about one second as one columnar message. A reader can get all frames, only those with one
block, or all frames merged into one.

Owns the two extra columns: each frame's log time, and its position among the chunk's other messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import U4, BlockRows
from kvscope_telemetry.messages.telemetry import Counters, DeltaCheckpoint, Frame, Moves, RequestRows
from kvscope_telemetry.recordings.columns import Columns, Ints, Numbers, pack

TimedFrame = tuple[int, Frame]
"""Log time in ns, and a frame or a delta checkpoint that replaces several frames."""
_LOG_TIME_OFFSET: Final = "log_time_offset_ns"
_MESSAGES_BEFORE: Final = "messages_before"
"""Name of the column with the number of messages of the same chunk, not counting frames, that precede each frame."""


def pack_frames(timed: Sequence[TimedFrame], messages_before: Sequence[int]) -> bytes:
    """Encode frames as columns. Raises ValueError or OverflowError for inconsistent frames."""
    offsets = [log_time_ns - frame.time_ns for log_time_ns, frame in timed]
    return pack([frame for _, frame in timed], {_LOG_TIME_OFFSET: offsets, _MESSAGES_BEFORE: messages_before})


class FrameBatch:
    """Decoder of `pack_frames`' output. The constructor and all methods raise ProtocolError for invalid data."""

    def __init__(self, data: bytes) -> None:
        self._columns = Columns(data)
        if self._columns.kind != Frame.__name__:
            raise ProtocolError(f"columns of {self._columns.kind:.40} where frames are expected")
        self.num_frames = self._columns.num_records
        self.log_times: Ints = self._columns.numbers("time_ns") + self._columns.numbers(_LOG_TIME_OFFSET)

    def frames(self, indices: Sequence[int] | None = None) -> list[TimedFrame]:
        times = self.log_times if indices is None else self.log_times[indices]
        return list(zip(times.tolist(), self._columns.records(Frame, indices), strict=True))

    @property
    def messages_before(self) -> list[int]:
        """For each frame, the number of the chunk's other messages that precede it."""
        before: list[int] = self._columns.numbers(_MESSAGES_BEFORE).tolist()
        return before

    def joined(self, until_ns: int | None) -> list[TimedFrame] | None:
        """Return all frames merged into one delta checkpoint; None if the frames are not consecutive.

        With `until_ns` (log time), only the frames up to that time are included. The last of them is then returned
        separately, after the delta checkpoint.
        """
        if not self._is_consecutive():
            return None
        if until_ns is None:
            return [self._merged_frames(self.num_frames)]
        last = int(np.searchsorted(self.log_times, until_ns, "right")) - 1
        return ([self._merged_frames(last)] if last > 0 else []) + (self.frames([last]) if last >= 0 else [])

    def _merged_frames(self, end: int) -> TimedFrame:
        columns = self._columns
        return int(self.log_times[end - 1]), self._delta_checkpoint(
            0,
            end,
            blocks=columns.table(BlockRows, "blocks", end),
            requests=columns.table(RequestRows, "requests", end),
            new_requests=tuple(chain.from_iterable(columns.objects(Frame, "new_requests")[:end])),
            events=tuple(chain.from_iterable(columns.objects(Frame, "events")[:end])),
            counters=columns.table(Counters, "counters", end),
        )

    def frames_with_block(self, block: int) -> Iterator[tuple[int, TimedFrame]]:
        """Yield the frames that contain `block`, each with its index, and empty delta checkpoints that replace the
        others.
        """
        if not self._is_consecutive():
            yield from enumerate(self.frames())
            return
        indices = self._indices_with_block(block).tolist()
        next_index = 0
        for index, timed in zip(indices, self.frames(indices) if indices else (), strict=True):
            if index > next_index:
                yield index - 1, (int(self.log_times[index - 1]), self._delta_checkpoint(next_index, index))
            yield index, timed
            next_index = index + 1
        if next_index < self.num_frames:
            yield self.num_frames - 1, (int(self.log_times[-1]), self._delta_checkpoint(next_index, self.num_frames))

    def _indices_with_block(self, block: int) -> Ints:
        has_block = np.zeros(self.num_frames, np.bool_)
        columns: list[tuple[Numbers, Ints]] = [self._columns.keys("blocks", "ids")]
        columns += [self._columns.packed(f"moves.{name}", U4) for name in Moves.__struct_fields__]
        for ids, counts in columns:
            has_block[np.repeat(np.arange(len(counts)), counts)[ids == block]] = True
        return np.flatnonzero(has_block)

    def _is_consecutive(self) -> bool:
        seqs, epochs = self._columns.numbers("seq"), self._columns.numbers("epoch")
        in_order = (np.diff(seqs) == 1).all() and (np.diff(self.log_times) >= 0).all()
        return bool(in_order and (epochs == epochs[0]).all())

    def _delta_checkpoint(self, begin: int, end: int, **parts: Any) -> DeltaCheckpoint:
        """Return a delta checkpoint that covers the frames from index `begin` up to, not including, `end`."""
        epoch, seq, step, time_ns = (
            int(self._columns.numbers(name)[end - 1]) for name in ("epoch", "seq", "step", "time_ns")
        )
        since_seq = int(self._columns.numbers("seq")[begin]) - 1
        return DeltaCheckpoint(epoch=epoch, seq=seq, step=step, time_ns=time_ns, since_seq=since_seq, **parts)
