"""Reads the history of one block from a time range of a recording, and concatenates the histories of several ranges.

Frames that do not contain the block are not unpacked, so that minutes of a fast engine are scanned in less than a
second. No file stays open between calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from msgspec.structs import replace

from kvscope_telemetry.ledger import LASTING
from kvscope_telemetry.messages.telemetry import DeltaCheckpoint, Frame, TelemetryMessage
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.block_changes import HISTORY_DTYPE, BlockChanges, ChangeKind, Rows
from kvscope_telemetry.summaries.block_moments import BlockMoment, BlockMoments, block_moments_of, moments_of

_PROGRESS_EVERY: Final = 64
_LATE_NS: Final = 1_000_000_000
"""Maximum delay of a frame's time in the file relative to its actual time."""


@dataclass(frozen=True, slots=True)
class BlockHistoryPart:
    begin_ns: int
    end_ns: int
    rows: Rows = field(default_factory=lambda: np.zeros(0, HISTORY_DTYPE))
    block_moments: BlockMoments = field(default_factory=BlockMoments)
    num_forgotten: int = 0
    """Number of history rows dropped because the history exceeded its limit. If not 0, `begin_ns` is the time
    of the oldest retained row.
    """

    @property
    def moments(self) -> tuple[BlockMoment, ...]:
        return self.block_moments.moments


def read_part(
    recorded: Recording,
    block: int,
    from_ns: int,
    until_ns: int,
    block_size: int,
    watch: ProgressCallback = lambda share: True,
    *,
    last: tuple[int, int] | None = None,
) -> BlockHistoryPart:
    """Return the history of `block` from `from_ns` to `until_ns`, both inclusive.

    Args:
        block_size: Tokens per block.
        watch: Called with the share done, from 0 to 1; returns False to cancel.
        last: Epoch and sequence number of the frame that was current at `until_ns`. It is included even if its log time
            is later: log times never decrease, so a heartbeat that was recorded before it can delay its log time.

    Raises:
        OpeningCancelled: `watch` returned False.
    """
    block_history = BlockChanges(block)
    for _, message in recorded.state_messages((from_ns - recorded.start_ns) / 1e9):
        _report_progress(watch, 0.0)
        block_history.feed(message, from_ns)
    block_history.start_at(from_ns)
    length_ns = max(until_ns - from_ns, 1)
    late_ns = until_ns if last is None else until_ns + _LATE_NS
    for count, (log_time_ns, moments) in enumerate(recorded.messages_about(block, from_ns, late_ns)):
        if count % _PROGRESS_EVERY == 0 or isinstance(moments, DeltaCheckpoint):
            _report_progress(watch, (log_time_ns - from_ns) / length_ns)
        if log_time_ns <= until_ns or _is_until(moments, last):
            block_history.feed(_resumed_after(block_history.seq, moments), min(log_time_ns, until_ns))
    return history_part(block_history, from_ns, until_ns, block_size)


def history_part(block_history: BlockChanges, begin_ns: int, end_ns: int, block_size: int) -> BlockHistoryPart:
    rows = block_history.rows.copy()
    if block_history.num_forgotten and rows.size:
        begin_ns = int(rows["time_ns"][0])
    return BlockHistoryPart(
        begin_ns, end_ns, rows, block_moments_of(moments_of(rows, block_size)), block_history.num_forgotten
    )


class GrowingBlockHistory:
    """History of a block in a live session, extended incrementally."""

    def __init__(self, block: int, block_size: int) -> None:
        self.block_history = BlockChanges(block)
        self._block_size = block_size
        self._block_moments = BlockMoments()
        self._num_rows = 0
        """Number of history rows converted to moments so far, including rows that were dropped since."""

    @property
    def has_news(self) -> bool:
        """Whether rows were added since the last `part` was returned."""
        return self._num_rows < self.block_history.num_forgotten + self.block_history.rows.size

    def part(self, begin_ns: int, end_ns: int) -> BlockHistoryPart:
        rows, num_forgotten = self.block_history.rows, self.block_history.num_forgotten
        first = self._num_rows - num_forgotten  # the first row not converted yet
        if first < rows.size:
            fresh = block_moments_of(moments_of(rows[max(first - 1, 0) :], self._block_size))
            self._block_moments = self._block_moments.followed_by(fresh.without_first(1) if first > 0 else fresh)
            self._num_rows = num_forgotten + rows.size
        if num_forgotten:
            begin_ns = int(rows["time_ns"][0])
            self._block_moments = self._block_moments.without_first(
                int(np.searchsorted(self._block_moments.times_ns, begin_ns))
            )
        return BlockHistoryPart(begin_ns, end_ns, rows.copy(), self._block_moments, num_forgotten)


def concatenate_parts(older: BlockHistoryPart, newer: BlockHistoryPart) -> BlockHistoryPart:
    """Concatenate two parts. A gap between them is marked as unknown by a row of `ChangeKind.LOST`."""
    if not older.rows.size or not newer.rows.size:
        rows = older.rows if older.rows.size else newer.rows
        moments = older.block_moments if older.moments else newer.block_moments
        return BlockHistoryPart(older.begin_ns, newer.end_ns, rows, moments, older.num_forgotten + newer.num_forgotten)
    lost_row = np.zeros(0, HISTORY_DTYPE)
    newer_rows, moments = newer.rows, newer.block_moments
    if newer.begin_ns - older.end_ns > 1 and older.rows["how"][-1] != ChangeKind.LOST:
        lost_row = np.zeros(1, HISTORY_DTYPE)
        lost_row["time_ns"], lost_row["how"], lost_row["epoch"] = older.end_ns, ChangeKind.LOST, older.rows["epoch"][-1]
    elif _repeats_state(older.rows[-1], newer_rows[0]):
        newer_rows, moments = newer_rows[1:], moments.without_first(1)
    rows = np.concatenate((older.rows, lost_row, newer_rows))
    moments, num_forgotten = older.block_moments.followed_by(moments), older.num_forgotten + newer.num_forgotten
    return BlockHistoryPart(older.begin_ns, newer.end_ns, rows, moments, num_forgotten)


def _repeats_state(last: np.void, first: np.void) -> bool:
    is_known = first["how"] == ChangeKind.KNOWN and last["how"] != ChangeKind.LOST and first["epoch"] == last["epoch"]
    return bool(is_known and all(first[name] == last[name] for name in LASTING))


def _resumed_after(seq: int, message: TelemetryMessage) -> TelemetryMessage:
    """Return `message`. A delta checkpoint that begins before frame `seq` is shortened, because the history
    already covers the frames up to `seq`.
    """
    if isinstance(message, DeltaCheckpoint) and message.since_seq < seq < message.seq:
        return replace(message, since_seq=seq)
    return message


def _is_until(message: TelemetryMessage, last: tuple[int, int] | None) -> bool:
    """Whether `message` is the frame `last` (epoch, sequence number) or an earlier frame of its epoch."""
    return isinstance(message, Frame) and last is not None and message.epoch == last[0] and message.seq <= last[1]


def _report_progress(watch: ProgressCallback, share: float) -> None:
    if not watch(min(max(share, 0.0), 1.0)):
        raise OpeningCancelled
