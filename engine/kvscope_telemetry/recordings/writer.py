"""Writes a recording in a separate thread, fed by a bounded queue.

Owns the thread and the queue. Decides the wall-clock time of each message, and when derived data is written. Keyframes
and delta checkpoints are written between the messages. The summaries and events of several seconds are written together
in separate chunks, so that a file's whole overview can be read without its frames. The recording caller never blocks
and never fails: messages that do not fit into the queue are dropped and counted, and a full disk ends the recording but
preserves the data written so far.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from kvscope_telemetry.block_texts.block_texts import MAX_TEXT_BYTES, RecordedText, encode_text
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.message_size import approximate_bytes
from kvscope_telemetry.messages.telemetry import (
    DeltaCheckpoint,
    Frame,
    Goodbye,
    Hello,
    Progress,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.recordings.keyframes import INTERVAL_NS, Keyframes
from kvscope_telemetry.recordings.layout import BOOKMARKS, EVENTS, MAX_RECORDED_MESSAGE_BYTES, SUMMARIES, TEXTS
from kvscope_telemetry.recordings.mcap_file import Entry, McapFile, RecordingFile
from kvscope_telemetry.recordings.write_queue import MAX_QUEUED_BYTES, Mark, Queued, RecordingQueue, Texts
from kvscope_telemetry.summaries.bookmark import Bookmark, encode_bookmark
from kvscope_telemetry.summaries.summarizer import Summarizer
from kvscope_telemetry.summaries.summary import Summary, TimedEvent, join_events
from kvscope_telemetry.summaries.summary import encode as encode_json

MAX_PENDING_OVERVIEW: Final = 100_000
FLUSH_S: Final = 0.85
"""Maximum time in seconds that a message waits in the queue and in a partly filled chunk. The limit ensures
that a crash loses less than a second of messages, including those that are being written.
"""
OVERVIEW_INTERVAL_NS: Final = 10_000_000_000
"""Summaries and events are written together after this much recorded time, or after `MAX_OVERVIEW_BYTES`."""
MAX_OVERVIEW_BYTES: Final = 1 << 20

MAX_LISTED: Final = 1_000


class RecordingWriter:
    """Writes a recording to `path` (`.mcap`), which is named `path.part` until `close`. Raises BadInput if `path` is
    not usable. A `RecordingFile` may be given instead of a path.

    A recording can be played from its first snapshot on: write one at the start and after each gap.
    """

    def __init__(
        self,
        path: Path | str | RecordingFile,
        *,
        keyframe_interval_ns: int = INTERVAL_NS,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        collects_overview: bool = False,
    ) -> None:
        self._file: RecordingFile = McapFile(Path(path)) if isinstance(path, str | Path) else path
        self._clock = LogClock()
        self._annotations = _Annotations(keyframe_interval_ns)
        self.overview: deque[Summary | TimedEvent] | None = (
            deque(maxlen=MAX_PENDING_OVERVIEW) if collects_overview else None
        )
        """Summaries and events created so far, oldest first, for another thread to remove; None if they were not
        requested.
        """
        self._queue = RecordingQueue(max_queued_bytes)
        self.num_written = 0
        """Number of messages written, without keyframes, delta checkpoints, summaries and other derived data."""
        self._newest_ns = 0
        self._oldest_queued_s = 0.0  # when the oldest message in the partial chunk was queued
        self._texts: list[tuple[int, int, bytes]] = []  # held until the chunk in progress ends
        self._num_lost = 0  # removed from the queue and not written
        self._hello_epoch: int | None = None  # the engine start whose hello was written last
        self.failure = ""
        """Reason why the recording ended early; "" while it works."""
        self.saved_text = ""
        """After a failure, a text for the user about what was saved."""
        self._marks: list[Mark] = []  # marks among the items being written
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """Path that the file has once it is complete."""
        return self._file.path

    @property
    def part(self) -> Path:
        return self._file.part

    @property
    def num_dropped(self) -> int:
        """Number of messages not in the file: the queue was full, a message was too large, or the
        recording had ended.
        """
        return self._queue.num_refused + self._num_lost

    def write(
        self,
        message: TelemetryMessage,
        data: bytes | None = None,
        *,
        wait: bool = False,
        log_time_ns: int | None = None,
    ) -> bool:
        """Queue `message` for recording. Takes a microsecond or two and never blocks without `wait`.

        Args:
            message: The message to record.
            data: Its original encoding, if available.
            wait: Block until the queue has capacity instead of dropping the message; for callers without a deadline.
            log_time_ns: Wall-clock time of the message if the caller knows it; must not decrease.

        Returns:
            Whether the message was accepted.
        """
        return self._queue.put(message, data, wait=wait, log_time_ns=log_time_ns)

    def add_bookmark(self, bookmark: Bookmark) -> bool:
        """Queue a revision of a bookmark. Never blocks. Returns False if the recording has ended."""
        return self._queue.put_bookmark(bookmark)

    def write_texts(self, texts: Iterable[RecordedText], *, wait: bool = False) -> bool:
        """Queue block texts. Requires the user's consent. A text without a time gets that of the newest message."""
        items = tuple(texts)
        return not items or self._queue.put_texts(items, wait=wait)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Write everything queued so far to the operating system. Returns whether that succeeded within `timeout_s`."""
        mark = Mark()
        self._queue.put_mark(mark)
        return mark.wait(timeout_s) and not self.failure

    def close(self) -> None:
        """Write queued messages and rename the file to `path`. Idempotent.

        Raises:
            KvscopeError: The recording failed; the message says where the data written before is.
        """
        self._queue.close()
        self._thread.join()
        if self.failure:
            raise KvscopeError(f"recording {str(self.path)!r} stopped early: {self.failure}; {self.saved_text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with contextlib.suppress(KvscopeError):  # the first error is the one to report
                self.close()

    def _run(self) -> None:
        try:
            while (items := self._queue.drain(self._wait_s)) is not None:
                self._write(items)
                self._flush_when_due()
            self._file.add_chunk(self._annotations.due_entries(at_end=True))
            self._flush()
            self._collect_overview()
            self._file.finish()
        except OSError as error:
            self._fail(error.strerror or str(error))
        except KvscopeError as error:
            self._fail(str(error))
        except Exception as error:  # any error ends the recording, not the engine
            self._fail(f"{type(error).__name__}: {error}")

    def _write(self, items: list[Queued | Mark | Bookmark]) -> None:
        self._marks = [each for each in items if isinstance(each, Mark)]
        self._num_lost += sum(isinstance(each, Queued) for each in items)
        for each in items:
            if isinstance(each, Mark):
                self._flush()
                each.set()
            elif isinstance(each, Bookmark):
                self._file.add_chunk([(BOOKMARKS, max(each.time_ns, 0), encode_bookmark(each))])
            else:
                self._record(each)
        if any(isinstance(each, Queued) and isinstance(each.message, Snapshot) for each in items):
            self._flush()  # messages queued with a snapshot waited for it and are late already

    def _record(self, queued: Queued) -> None:
        message, data = queued.message, queued.data
        if isinstance(message, tuple):
            self._record_texts(message)
            return
        if queued.num_bytes > MAX_RECORDED_MESSAGE_BYTES:
            return
        given_ns = queued.log_time_ns
        log_time_ns = self._clock.log_time_ns(message) if given_ns is None else given_ns
        if log_time_ns > self._newest_ns and self._file.wants_state(log_time_ns):
            self._start_segment()
        if not self._file.has_unwritten:
            self._oldest_queued_s = queued.queued_s
        self._add_hello(message, log_time_ns)
        self._file.add_message(message, log_time_ns, queued.num_bytes, data)
        self._newest_ns = log_time_ns
        self.num_written += 1
        self._num_lost -= 1
        for state in self._annotations.add_message(message, log_time_ns):
            self._file.add_state(log_time_ns, state)
        if self._annotations.new:  # nothing can be due otherwise
            self._file.add_chunk(self._annotations.due_entries())
            self._collect_overview()
        self._write_texts()

    def _add_hello(self, message: TelemetryMessage, log_time_ns: int) -> None:
        """Write the hello of each engine start once, even if it was only received inside a snapshot."""
        if isinstance(message, Hello):
            self._hello_epoch = message.epoch
        elif isinstance(message, Snapshot) and message.hello.epoch != self._hello_epoch:
            self._hello_epoch = message.hello.epoch
            self._file.add_message(message.hello, log_time_ns, approximate_bytes(message.hello))

    def _record_texts(self, texts: Texts) -> None:
        """Write texts to separate chunks, so that readers that do not need them can skip them."""
        self._num_lost -= 1
        newest_ns = self._newest_ns
        if not newest_ns:  # the file has no state that they belong to
            return
        timed = [text if text.time_ns else msgspec.structs.replace(text, time_ns=newest_ns) for text in texts]
        entries = [(TEXTS, text.time_ns, encode_text(text)) for text in timed]
        self._texts += [entry for entry in entries if len(entry[2]) <= MAX_TEXT_BYTES]
        self._write_texts()

    def _write_texts(self) -> None:
        """Write texts only between two chunks of frames. Texts arrive with each step; writing them immediately
        would end the current chunk of frames each time.
        """
        if self._texts and not self._file.has_unwritten:
            texts, self._texts = self._texts, []
            self._file.add_chunk(texts)

    def _flush(self) -> None:
        self._file.flush()
        self._write_texts()

    def _start_segment(self) -> None:
        """Start the next file with the newest state, so that it can be read without the previous files. The current
        file ends with a delta checkpoint: its final state is then known even if its last seconds are damaged.
        """
        checkpoint = self._annotations.last_checkpoint()
        state = self._annotations.segment_state(self._newest_ns)
        if state is None:
            return
        if checkpoint is not None:
            self._file.add_state(self._newest_ns, checkpoint)
        self._file.add_chunk(self._annotations.due_entries(is_due=True))
        self._flush()
        self._file.start_segment()
        self._file.add_message(state.hello, self._newest_ns, approximate_bytes(state.hello))
        self._file.add_state(self._newest_ns, state)

    def _collect_overview(self) -> None:
        new = self._annotations.new
        if self.overview is not None:
            self.overview.extend(new)
        new.clear()

    @property
    def _wait_s(self) -> float:
        return self._oldest_queued_s + FLUSH_S - time.monotonic() if self._file.has_unwritten else FLUSH_S

    def _flush_when_due(self) -> None:
        if self._wait_s <= 0:
            self._flush()

    def _fail(self, reason: str) -> None:
        if not self.failure:  # later errors are consequences of the first
            self.saved_text = self._end_early()
            self.failure = reason
        self._queue.close(discard=True)
        for mark in self._marks:
            mark.set()

    def _end_early(self) -> str:
        if self._file.salvage():
            return f"what came before is in {self.path.name}"
        return f"see {self.part.name}" if self.part.exists() else "nothing of it was written"


class _Annotations:
    """Creates keyframes, delta checkpoints, summaries and events from the recorded messages.

    Call `add_message` with every message as it is recorded, then `due_entries` for the entries that are due.
    """

    def __init__(self, keyframe_interval_ns: int = INTERVAL_NS) -> None:
        self.follower = Follower()
        self._keyframes = Keyframes(self.follower, keyframe_interval_ns)
        self._summarizer = Summarizer(self.follower)
        self._waiting: list[Entry] = []
        self._waiting_events: list[tuple[int, bytes]] = []  # log time, JSON
        self._num_waiting_bytes = 0
        self._since_ns = self._newest_ns = 0
        self.new: list[Summary | TimedEvent] = []
        """Summaries and events that the caller has not collected yet."""

    def add_message(self, message: TelemetryMessage, log_time_ns: int) -> list[Snapshot | DeltaCheckpoint]:
        """Process a written message. Returns the delta checkpoint and keyframe that belong after it, if any."""
        for summary in self._summarizer.add_message(message, log_time_ns):
            self._record_summary(summary)
        for event in self._summarizer.drain_events():
            self._record_event(event)
        self.follower.feed(message)
        return self._keyframes.add_message(message, log_time_ns)

    def last_checkpoint(self) -> DeltaCheckpoint | None:
        """Return a delta checkpoint up to the current state, for the end of a file; None if the previous delta
        checkpoint already covers that state.
        """
        return self._keyframes.checkpoint()

    def due_entries(self, *, is_due: bool = False, at_end: bool = False) -> list[Entry]:
        """Return the summaries and events to be written together if their interval has passed, `is_due` or `at_end`;
        otherwise an empty list.

        `at_end` also completes the summary of the current second.
        """
        if at_end:
            for summary in self._summarizer.close():
                self._record_summary(summary)
        elif not (is_due or self._is_due):
            return []
        due = sorted(self._waiting, key=lambda entry: entry[1]) + _event_entries(self._waiting_events)
        self._waiting, self._waiting_events, self._num_waiting_bytes = [], [], 0
        return due

    def segment_state(self, log_time_ns: int) -> Snapshot | None:
        state = self._keyframes.keyframe(log_time_ns)
        if state is not None:
            self._summarizer.restate()
        return state

    @property
    def _is_due(self) -> bool:
        if not self._num_waiting_bytes:
            return False
        return self._newest_ns - self._since_ns >= OVERVIEW_INTERVAL_NS or self._num_waiting_bytes >= MAX_OVERVIEW_BYTES

    def _record_summary(self, summary: Summary) -> None:
        self.new.append(summary)
        data = encode_json(summary)
        self._count_pending(summary.time_ns, len(data))
        self._waiting.append((SUMMARIES, max(summary.time_ns, 0), data))

    def _record_event(self, event: TimedEvent) -> None:
        self.new.append(event)
        data = encode_json(event)
        self._count_pending(event.time_ns, len(data))
        self._waiting_events.append((max(event.time_ns, 0), data))

    def _count_pending(self, time_ns: int, num_bytes: int) -> None:
        if not self._num_waiting_bytes:
            self._since_ns = time_ns
        self._newest_ns = time_ns
        self._num_waiting_bytes += num_bytes


def _event_entries(events: list[tuple[int, bytes]]) -> list[Entry]:
    """Group events into messages, each with the log time of its newest event, so that a reader can skip older
    messages.
    """
    in_order = sorted(events, key=lambda event: event[0])
    lists = [in_order[begin : begin + MAX_LISTED] for begin in range(0, len(in_order), MAX_LISTED)]
    return [(EVENTS, some[-1][0], join_events(data for _, data in some)) for some in lists]


class LogClock:
    """Computes log times in ns: the wall clock of an epoch's hello, advanced by the engine's monotonic clock.

    Log times never decrease, neither within an epoch nor at the start of an epoch whose wall clock was set back. No two
    frames have the same log time, so that a reader can seek to each frame.
    """

    def __init__(self) -> None:
        self._offset_ns = 0
        self._last_ns: int | None = None
        self._last_frame_ns = -1
        self._epoch: int | None = None

    def log_time_ns(self, message: TelemetryMessage) -> int:
        """Return the log time of `message`, not earlier than that of any previous message.

        A message that has no time, or that arrives before the first hello, gets the log time of the previous message.
        If there is no previous message, it gets the current wall-clock time.
        """
        if isinstance(message, Frame) and self._epoch is not None:  # most messages are frames
            return self._frame_time_ns(message)
        hello = message if isinstance(message, Hello) else message.hello if isinstance(message, Snapshot) else None
        if hello is not None and hello.epoch != self._epoch:
            self._begin(hello)
        if isinstance(message, Progress | Goodbye) or self._epoch is None:
            last_ns = time.time_ns() if self._last_ns is None else self._last_ns
        else:
            last_ns = max(self._last_ns or 0, message.time_ns + self._offset_ns)
        if isinstance(message, Frame):
            last_ns = max(last_ns, self._last_frame_ns + 1)
            self._last_frame_ns = last_ns
        self._last_ns = last_ns
        return last_ns

    def _frame_time_ns(self, frame: Frame) -> int:
        time_ns = frame.time_ns + self._offset_ns
        self._last_frame_ns = self._last_ns = max(time_ns, self._last_ns or 0, self._last_frame_ns + 1)
        return self._last_ns

    def _begin(self, hello: Hello) -> None:
        self._epoch = hello.epoch
        self._offset_ns = max(hello.wall_time_ns, self._last_ns or 0) - hello.time_ns
