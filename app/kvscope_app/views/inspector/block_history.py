"""History of the selected block: the recorded part is read on a thread, and live changes are added as they arrive.

Owns the selected block and its known history. The recording is read in slices, the ones near the cursor first, up to
limits of history rows and time. Selecting another block cancels the reading.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.background import Background
from kvscope_app.session.recording.recording_handle import RecordingHandle
from kvscope_app.session.session import Session
from kvscope_app.ui.number_text import seconds
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.recordings.block_history import (
    BlockHistoryPart,
    GrowingBlockHistory,
    concatenate_parts,
    read_part,
)
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.source import Update

_LENGTHS_NS: Final = tuple(length * 1_000_000_000 for length in (20, 100, 480))
"""Lengths in ns of the recording's slices, from the one nearest to the cursor outwards. All further slices have the
last length.
"""
MAX_WORK_S: Final = 180.0
"""Time limit of one read, in seconds. The remaining slices are read when the cursor moves there."""
MAX_ROWS: Final = 60_000
_NUM_NEAR_SLICES: Final = 2 * len(_LENGTHS_NS)
_YIELD_SLEEP_S: Final = 0.001
"""Seconds of sleep at each progress report while distant slices are read, so that other threads can run."""
_POLL_INTERVAL_MS: Final = 80
_TOLERANCE_NS: Final = 1_000_000_000
_EXTEND_INTERVAL_NS: Final = 250_000_000
_MAX_IDLE_NS: Final = 600_000_000_000
"""Maximum time in ns by which the cursor may be ahead of the newest frame while the engine counts as idle.

If the cursor is further ahead, the clocks of the engine and this machine differ, and the cursor's time is not used.
"""
HISTORY_UNAVAILABLE: Final = "Earlier history is not available"


class BlockHistory(QObject):
    """History of one block; empty until `set_block` is called."""

    changed = Signal()

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.failure = ""
        self._session = session
        self._block: int | None = None
        self._handle: RecordingHandle | None = None
        self._recorded: BlockHistoryPart | None = None
        self._live: GrowingBlockHistory | None = None
        self._live_begin_ns = 0
        self._live_begin_frame = (0, 0)
        """(epoch, seq) of the newest frame at `_live_begin_ns`."""
        self._joined_part: BlockHistoryPart | None = None
        self._requested_ns = 0
        self._is_requested = False
        self._work: Background[None] | None = None
        self._parts: deque[BlockHistoryPart] = deque()
        self._timer = QTimer(self, interval=_POLL_INTERVAL_MS)
        self._timer.timeout.connect(self._poll)
        session.timeline.updated.connect(self._extend)

    @property
    def block(self) -> int | None:
        return self._block

    @property
    def is_reading(self) -> bool:
        return self._work is not None or self._is_requested

    @property
    def share(self) -> float:
        return 0.0 if self._work is None else self._work.share

    @property
    def part(self) -> BlockHistoryPart | None:
        if self._joined_part is None:
            live = self._live_history()
            self._joined_part = (
                live
                if self._recorded is None
                else self._recorded
                if live is None
                else concatenate_parts(self._recorded, live)
            )
        elif self._live is not None and self._now_ns() - self._joined_part.end_ns > _EXTEND_INTERVAL_NS:
            self._joined_part = replace(self._joined_part, end_ns=self._now_ns())
        return self._joined_part

    def set_block(self, block: int | None) -> None:
        if block == self._block:
            return
        self._cancel()
        self._block, self._recorded, self._live, self._joined_part = block, None, None, None
        self.failure = ""
        if block is not None:
            self._start_live(block)
            self._read_around(self._session.timeline.cursor_ns)
        self.changed.emit()

    def follow_cursor(self) -> None:
        """Read around the cursor if it left the known history. Call after the cursor moved."""
        timeline = self._session.timeline
        cursor_ns, recorded, time_range = timeline.cursor_ns, self._recorded, timeline.range_ns
        if self._block is None or self.is_reading or recorded is None or time_range is None:
            return
        is_before = cursor_ns < recorded.begin_ns - _TOLERANCE_NS and recorded.begin_ns > time_range[0] + _TOLERANCE_NS
        end_ns = self._recorded_end_ns(time_range)
        is_after = recorded.end_ns + _TOLERANCE_NS < min(cursor_ns, end_ns)
        if (is_before or is_after) and abs(cursor_ns - self._requested_ns) > _TOLERANCE_NS:
            self._read_around(cursor_ns)

    def close(self) -> None:
        """Cancel reading, and wait for the thread for at most 2 s."""
        work = self._work
        self._cancel()
        self._timer.stop()
        if work is not None:
            work.wait(2.0)

    # Live changes

    def _start_live(self, block: int) -> None:
        mirror = self._session.live_mirror
        if self._session.timeline.is_file or mirror.hello is None:
            return
        self._live, self._live_begin_ns = GrowingBlockHistory(block, mirror.hello.cache.block_size), _wall_ns(mirror)
        self._live_begin_frame = (mirror.hello.epoch, mirror.seq)
        self._live.block_history.add_known(mirror.ledger, self._live_begin_ns, mirror.hello.epoch, mirror.step)

    def _extend(self, update: Update | None) -> None:
        mirror = self._session.live_mirror
        if self._live is None or update is None or mirror.hello is None:
            return
        block_history = self._live.block_history
        if update.snapshot is not None:
            block_history.add_known(mirror.ledger, _wall_ns(mirror), mirror.hello.epoch, mirror.step)
        else:
            block_history.add_update(update, mirror.hello.wall_time_ns - mirror.hello.time_ns)
        if self._live.has_news:
            self._joined_part = None
            self.changed.emit()

    def _live_history(self) -> BlockHistoryPart | None:
        if self._live is None:
            return None
        return self._live.part(self._live_begin_ns, self._now_ns())

    def _now_ns(self) -> int:
        """Return the end of the known live history: the time of the newest frame or, while the engine is idle and sends
        no frames, the cursor's time.
        """
        reported_ns = max(_wall_ns(self._session.live_mirror), self._live_begin_ns)
        timeline = self._session.timeline
        cursor_ns = reported_ns if timeline.is_paused else timeline.cursor_ns
        return cursor_ns if 0 < cursor_ns - reported_ns < _MAX_IDLE_NS else reported_ns

    # Recorded history

    def _read_around(self, cursor_ns: int) -> None:
        """Request a read around `cursor_ns`. It starts when the running thread has ended."""
        self._handle = self._handle or self._session.new_recording_handle()
        if self._handle is None:
            self.failure = HISTORY_UNAVAILABLE
            return
        self._cancel()
        self._requested_ns, self._is_requested = cursor_ns, True
        # do not restart the timer: selecting many blocks in a row with a held key would postpone it forever
        if not self._timer.isActive():
            self._timer.start()

    def _recorded_end_ns(self, time_range: tuple[int, int]) -> int:
        return time_range[1] if self._live is None else self._live_begin_ns

    def _start(self) -> None:
        time_range, mirror = self._session.timeline.range_ns, self._session.mirror
        handle, block = self._handle, self._block
        if time_range is None or handle is None or block is None or mirror.hello is None:
            return
        self._is_requested, self._recorded, self._parts = False, None, deque()
        first_ns, last_ns = time_range[0], max(self._recorded_end_ns(time_range), time_range[0])
        cursor_ns = min(max(self._requested_ns, first_ns), last_ns)
        slices = list(reading_order(cursor_ns, first_ns, last_ns))
        parts, size = self._parts, mirror.hello.cache.block_size
        end = None if self._live is None else (last_ns, self._live_begin_frame)

        def work(report_progress: ProgressCallback) -> None:
            _read_slices(handle, block, size, slices, parts, report_progress, end)

        self._work = Background(work, "kvscope-block-history")

    def _poll(self) -> None:
        """Start a requested read, and add the slices that the thread has read. The timer calls this while something is
        read.
        """
        if self._work is None and self._is_requested:
            self._start()
        has_more = bool(self._parts)
        while self._parts:
            self._add_part(self._parts.popleft())
        work = self._work
        if work is not None and work.is_finished and not self._parts:
            if not work.is_cancelled:
                self.failure = work.failure
            self._work = None
            has_more = True
        if self._work is None and not self._is_requested:
            self._timer.stop()
        if has_more:
            self.changed.emit()

    def _add_part(self, part: BlockHistoryPart) -> None:
        recorded = self._recorded
        if recorded is None:
            self._recorded = part
        elif part.end_ns <= recorded.begin_ns:
            self._recorded = concatenate_parts(part, recorded)
        else:
            self._recorded = concatenate_parts(recorded, part)
        self._joined_part = None

    def _cancel(self) -> None:
        self._is_requested = False
        self._parts = deque()
        if self._work is not None:
            self._work.cancel()


def reading_order(cursor_ns: int, first_ns: int, last_ns: int) -> Iterator[tuple[int, int]]:
    """Yield the slices of the recording to read, as (begin, end) in ns: the one before the cursor, the one after it,
    then alternately further before and after.
    """
    begin_ns = end_ns = cursor_ns
    if first_ns == last_ns:
        yield cursor_ns, cursor_ns
    lengths = iter(_LENGTHS_NS)
    length_ns = _LENGTHS_NS[0]
    while begin_ns > first_ns or end_ns < last_ns:
        length_ns = next(lengths, length_ns)
        if begin_ns > first_ns:
            from_ns = max(begin_ns - length_ns, first_ns)
            yield from_ns, begin_ns
            begin_ns = from_ns
        if end_ns < last_ns:
            until_ns = min(end_ns + length_ns, last_ns)
            yield end_ns, until_ns
            end_ns = until_ns


def known_text(part: BlockHistoryPart) -> str:
    """Return the length of the known history as text, for example "over 12.5 s"."""
    begin_ns = max(part.begin_ns, int(part.rows["time_ns"][0])) if part.rows.size else part.end_ns
    return f"over {seconds((part.end_ns - begin_ns) / 1e9)}"


def _read_slices(
    handle: RecordingHandle,
    block: int,
    block_size: int,
    slices: list[tuple[int, int]],
    parts: deque[BlockHistoryPart],
    report_progress: ProgressCallback,
    end: tuple[int, tuple[int, int]] | None,
) -> None:
    """Read the block's history in `slices` into `parts`.

    For a live session, `end` is the time at which live changes replace the recording, and the (epoch, seq) of the frame
    at that time. For a recording in a file, `end` is None.
    """
    deadline_s = time.monotonic() + MAX_WORK_S
    recorded, num_rows = handle.get(report_progress), 0
    earliest_ns: int | None = None
    for index, (from_ns, until_ns) in enumerate(slices):
        if earliest_ns is not None and until_ns <= earliest_ns:
            continue  # would not be adjacent to what is known

        def report_slice(share: float, index: int = index) -> bool:
            time.sleep(0 if index < _NUM_NEAR_SLICES else _YIELD_SLEEP_S)  # lets the window's thread run
            return report_progress((index + share) / len(slices)) and time.monotonic() < deadline_s

        end_frame = end[1] if end is not None and until_ns == end[0] else None
        part = read_part(recorded, block, from_ns, until_ns, block_size, report_slice, last=end_frame)
        parts.append(part)
        num_rows += part.rows.size
        if num_rows > MAX_ROWS:
            return
        if part.num_forgotten and until_ns <= slices[0][1]:
            earliest_ns = part.begin_ns


def _wall_ns(mirror: Mirror) -> int:
    assert mirror.hello is not None, "time begins with an engine"
    return mirror.time_ns + mirror.hello.wall_time_ns - mirror.hello.time_ns
