"""History of the selected block: the recorded part is read on a thread, and live changes are added as they arrive.

Owns the selected block and its known history, which is read slice by slice, first near the cursor and eventually all.
Bounded in rows and work; reading is cancelled when another block is selected.
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
from kvscope_telemetry.recordings.block_history import BlockHistoryPart, GrowingBlockHistory, joined, read_part
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.source import Update

_LENGTHS_NS: Final = tuple(length * 1_000_000_000 for length in (20, 100, 480))
"""Lengths of the slices, the first ones near the cursor. Once exhausted, the last length repeats until nothing is
left."""
MAX_WORK_S: Final = 180.0
"""Time limit in seconds. The rest is read when the cursor moves there."""
MAX_ROWS: Final = 60_000
"""Maximum rows over all slices; no further slices are read beyond it."""
_NUM_NEAR_SLICES: Final = 2 * len(_LENGTHS_NS)
_REST_S: Final = 0.001
"""Seconds of sleep at intervals while distant slices are read, so that other threads can run."""
_POLL_INTERVAL_MS: Final = 80
_NEAR_NS: Final = 1_000_000_000
_STEP_NS: Final = 250_000_000
"""Interval at which an ongoing history is extended to the current time."""
_QUIET_NS: Final = 600_000_000_000
"""Maximum time an engine is assumed to be idle; if the cursor is further ahead, its clock is another machine's."""
NOT_KEPT: Final = "Earlier history is not available"


class BlockHistory(QObject):
    """History of one block; empty before the first `set_block`."""

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
        self._live_after = (0, 0)
        """Epoch and sequence number of the newest frame at `_live_begin_ns`."""
        self._whole: BlockHistoryPart | None = None
        self._requested_ns = 0
        self._is_wanted = False
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
        return self._work is not None or self._is_wanted

    @property
    def share(self) -> float:
        """Progress of reading, 0 to 1."""
        return 0.0 if self._work is None else self._work.share

    @property
    def part(self) -> BlockHistoryPart | None:
        """All known history, or None if there is none yet."""
        if self._whole is None:
            live = self._live_history()
            self._whole = (
                live if self._recorded is None else self._recorded if live is None else joined(self._recorded, live)
            )
        elif self._live is not None and self._now_ns() - self._whole.end_ns > _STEP_NS:
            self._whole = replace(self._whole, end_ns=self._now_ns())
        return self._whole

    def set_block(self, block: int | None) -> None:
        if block == self._block:
            return
        self._cancel()
        self._block, self._recorded, self._live, self._whole = block, None, None, None
        self.failure = ""
        if block is not None:
            self._begin_live(block)
            self._read_around(self._session.timeline.cursor_ns)
        self.changed.emit()

    def follow_cursor(self) -> None:
        """Read around the cursor if it is outside the known history. Call after the cursor moved."""
        timeline = self._session.timeline
        cursor_ns, known, around = timeline.cursor_ns, self._recorded, timeline.range_ns
        if self._block is None or self.is_reading or known is None or around is None:
            return
        is_before = cursor_ns < known.begin_ns - _NEAR_NS and known.begin_ns > around[0] + _NEAR_NS
        last_ns = self._last_ns(around)
        is_after = known.end_ns + _NEAR_NS < min(cursor_ns, last_ns)
        if (is_before or is_after) and abs(cursor_ns - self._requested_ns) > _NEAR_NS:
            self._read_around(cursor_ns)

    def close(self) -> None:
        """Cancel reading and wait for the thread."""
        work = self._work
        self._cancel()
        self._timer.stop()
        if work is not None:
            work.wait(2.0)

    # Live changes

    def _begin_live(self, block: int) -> None:
        mirror = self._session.live_mirror
        if self._session.timeline.is_file or mirror.hello is None:
            return
        self._live, self._live_begin_ns = GrowingBlockHistory(block, mirror.hello.cache.block_size), _wall_ns(mirror)
        self._live_after = (mirror.hello.epoch, mirror.seq)
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
            self._whole = None
            self.changed.emit()

    def _live_history(self) -> BlockHistoryPart | None:
        if self._live is None:
            return None
        return self._live.part(self._live_begin_ns, self._now_ns())

    def _now_ns(self) -> int:
        """Return the time up to which nothing else happened. An idle engine sends nothing, so this may be the cursor's
        time."""
        reported_ns = max(_wall_ns(self._session.live_mirror), self._live_begin_ns)
        timeline = self._session.timeline
        cursor_ns = reported_ns if timeline.is_paused else timeline.cursor_ns
        return cursor_ns if 0 < cursor_ns - reported_ns < _QUIET_NS else reported_ns

    # Recorded history

    def _read_around(self, cursor_ns: int) -> None:
        """Request reading around `cursor_ns`, which starts once the running thread has ended."""
        self._handle = self._handle or self._session.new_recording_handle()
        if self._handle is None:
            self.failure = NOT_KEPT
            return
        self._cancel()
        self._requested_ns, self._is_wanted = cursor_ns, True
        # do not restart the timer: selecting many blocks in a row with a held key would postpone it forever
        if not self._timer.isActive():
            self._timer.start()

    def _last_ns(self, around: tuple[int, int]) -> int:
        return around[1] if self._live is None else self._live_begin_ns

    def _start(self) -> None:
        around, mirror = self._session.timeline.range_ns, self._session.mirror
        handle, block = self._handle, self._block
        if around is None or handle is None or block is None or mirror.hello is None:
            return
        self._is_wanted, self._recorded, self._parts = False, None, deque()
        first_ns, last_ns = around[0], max(self._last_ns(around), around[0])
        cursor_ns = min(max(self._requested_ns, first_ns), last_ns)
        pieces = list(reading_order(cursor_ns, first_ns, last_ns))
        parts, size = self._parts, mirror.hello.cache.block_size
        end = None if self._live is None else (last_ns, self._live_after)

        def work(watch: ProgressCallback) -> None:
            _read_slices(handle, block, size, pieces, parts, watch, end)

        self._work = Background(work, "kvscope-block-history")

    def _poll(self) -> None:
        """Collect what the thread has read. Called by the timer while something is read."""
        if self._work is None and self._is_wanted:
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
        if self._work is None and not self._is_wanted:
            self._timer.stop()
        if has_more:
            self.changed.emit()

    def _add_part(self, part: BlockHistoryPart) -> None:
        known = self._recorded
        if known is None:
            self._recorded = part
        elif part.end_ns <= known.begin_ns:
            self._recorded = joined(part, known)
        else:
            self._recorded = joined(known, part)
        self._whole = None

    def _cancel(self) -> None:
        self._is_wanted = False
        self._parts = deque()
        if self._work is not None:
            self._work.cancel()


def reading_order(cursor_ns: int, first_ns: int, last_ns: int) -> Iterator[tuple[int, int]]:
    """Yield adjacent time ranges: before the cursor, after it, further before, and so on."""
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
    begin_ns = max(part.begin_ns, int(part.rows["time_ns"][0])) if part.rows.size else part.end_ns
    return f"over {seconds((part.end_ns - begin_ns) / 1e9)}"


def _read_slices(
    handle: RecordingHandle,
    block: int,
    block_size: int,
    slices: list[tuple[int, int]],
    parts: deque[BlockHistoryPart],
    watch: ProgressCallback,
    end: tuple[int, tuple[int, int]] | None,
) -> None:
    """Read `slices` into `parts`. `end`: time at which live changes take over, and the (epoch, seq) of the frame at
    that time."""
    until_s = time.monotonic() + MAX_WORK_S
    recorded, num_rows = handle.get(watch), 0
    earliest_ns: int | None = None
    for index, (from_ns, until_ns) in enumerate(slices):
        if earliest_ns is not None and until_ns <= earliest_ns:
            continue  # would not be adjacent to what is known

        def report(share: float, index: int = index) -> bool:
            time.sleep(0 if index < _NUM_NEAR_SLICES else _REST_S)  # lets the window's thread run
            return watch((index + share) / len(slices)) and time.monotonic() < until_s

        last = end[1] if end is not None and until_ns == end[0] else None
        part = read_part(recorded, block, from_ns, until_ns, block_size, report, last=last)
        parts.append(part)
        num_rows += part.rows.size
        if num_rows > MAX_ROWS:
            return
        if part.num_forgotten and until_ns <= slices[0][1]:
            earliest_ns = part.begin_ns


def _wall_ns(mirror: Mirror) -> int:
    assert mirror.hello is not None, "time begins with an engine"
    return mirror.time_ns + mirror.hello.wall_time_ns - mirror.hello.time_ns
