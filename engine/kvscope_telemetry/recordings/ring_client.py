"""Client of a ring that a separate process writes, so that packing and writing never delay the threads of the session's
process.

Owns the ring's process, the two threads that communicate with it, and its last reported status. Packing frames is
Python code. In the session's process, it would hold the GIL half of the time at thousands of frames per second, and the
window would wait for the GIL while drawing. If the session's process crashes, the ring's process still writes
everything that it received.

See docs/internals/decisions/0005-recent-history-has-its-own-process.md.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Final

from kvscope_telemetry import operating_system
from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.ring import FLUSH_WAIT_S, MAX_BYTES, MAX_SECONDS
from kvscope_telemetry.recordings.ring_folder import delete_ring, hold
from kvscope_telemetry.recordings.ring_packets import (
    BeginRing,
    PacketKind,
    PacketReader,
    RingLimits,
    RingStatus,
    decode_status,
    encoded,
    head,
    packet,
)
from kvscope_telemetry.recordings.ring_segments import Bounds
from kvscope_telemetry.recordings.write_queue import Mark, Queued, RecordingQueue
from kvscope_telemetry.recordings.writer import MAX_PENDING_OVERVIEW
from kvscope_telemetry.summaries.bookmark import Bookmark, encode_bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent

COMMAND: Final = (sys.executable, "-P", "-m", "kvscope_telemetry.recordings.ring_process")
_POLL_INTERVAL_S: Final = 1.0
_READ_BYTES: Final = 1 << 18
_MAX_BUFFERS: Final = 512
"""Maximum number of buffers per `writev` system call. Operating systems accept 1,024."""
_PIPE_BYTES: Final = 1 << 20
"""Capacity requested for the pipe. The sending thread is woken immediately once as many bytes are queued."""


class _Flush(Mark):
    is_flushed = False


class RingClient:
    """Ring in `folder` with the interface of `Ring`. Its status is up to a quarter of a second old.

    Raises BadInput for invalid limits. All other errors are reported in `failure` soon after.
    """

    def __init__(self, folder: Path | str, *, max_bytes: int = MAX_BYTES, max_seconds: float = MAX_SECONDS) -> None:
        self.folder: Final = Path(folder)
        self._bounds = self._sent_bounds = Bounds(max_bytes, max_seconds)
        self._queue = RecordingQueue()
        self._status = RingStatus()
        self._overview: deque[Summary | TimedEvent] = deque(maxlen=MAX_PENDING_OVERVIEW)
        self._marks_by_number: dict[int, Mark] = {}
        self._num_marks = 0
        self._end_reason = ""
        self._is_kept = False
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: tuple[threading.Thread, ...] = ()
        try:
            self._start()
        except OSError as error:
            self._end(f"the process that writes it cannot be started: {error.strerror or error}")

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def failure(self) -> str:
        return self._status.failure or self._end_reason

    @property
    def pause(self) -> str:
        return "" if self.failure else self._status.pause

    @property
    def num_bytes(self) -> int:
        return self._status.num_bytes

    @property
    def origin_ns(self) -> int | None:
        return self._status.origin_ns

    @property
    def start_ns(self) -> int | None:
        return self._status.start_ns

    @property
    def end_ns(self) -> int | None:
        return self._status.end_ns

    @property
    def num_dropped(self) -> int:
        return self._queue.num_refused + self._status.num_dropped

    @property
    def bounds(self) -> Bounds:
        return self._bounds

    def drain_overview(self) -> list[Summary | TimedEvent]:
        """Return and clear the summaries and events received since the last call. Those of each status message
        are adjacent: first its summaries, then its events.
        """
        return [self._overview.popleft() for _ in range(len(self._overview))]

    def set_bounds(self, *, max_bytes: int, max_seconds: float) -> None:
        self._bounds = Bounds(max_bytes, max_seconds)
        self._queue.put_mark(Mark())  # wakes the sender, which sends the new limits

    def write(self, message: TelemetryMessage, data: bytes | None = None, *, wait: bool = False) -> bool:
        if self.failure:
            return False
        return self._queue.put(message, None, wait=wait) if data is None else self._queue.put_bytes(data, wait=wait)

    def add_bookmark(self, bookmark: Bookmark) -> bool:
        return not self.failure and self._queue.put_bookmark(bookmark)

    def write_texts(self, texts: Iterable[RecordedText]) -> bool:
        items = tuple(texts)
        return not self.failure and (not items or self._queue.put_texts(items, wait=False))

    def flush(self, timeout_s: float = FLUSH_WAIT_S) -> bool:
        mark = _Flush()
        self._queue.put_mark(mark)
        return mark.wait(timeout_s) and mark.is_flushed

    def close(self, *, keep: bool = False) -> None:
        """Release the folder. It is deleted unless `keep`, which writes queued messages first. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        self._is_kept = keep
        is_ours = self._status.is_held
        if is_ours and not keep:
            process.kill()  # the folder is deleted anyway
        self._queue.close(discard=not keep)
        for thread in self._threads:
            thread.join()
        if is_ours and not keep:
            self._delete()

    # private

    def _start(self) -> None:
        process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in the terminal goes to the session's process, which ends this one. No new POSIX session: Linux
            # divides CPU time among sessions first, and the low priority would have no effect.
            **operating_system.own_process_group(),
        )
        assert process.stdin is not None, "a pipe"
        self._process = process
        operating_system.widen_pipe(process.stdin, _PIPE_BYTES)
        sender = threading.Thread(target=self._send, args=(process.stdin,), name="kvscope-ring", daemon=True)
        receiver = threading.Thread(
            target=self._receive_statuses, args=(process,), name="kvscope-ring-told", daemon=True
        )
        self._threads = (sender, receiver)
        for thread in self._threads:
            thread.start()

    def _send(self, pipe: IO[bytes]) -> None:
        try:
            with pipe:
                pipe.write(packet(PacketKind.BEGIN, encoded(BeginRing(str(self.folder), _limits(self._bounds)))))
                pipe.flush()
                while (items := self._queue.drain(_POLL_INTERVAL_S)) is not None:
                    _write_all(pipe.fileno(), list(self._packets(items)))
                pipe.write(packet(PacketKind.END, encoded(self._is_kept)))
        except OSError:  # the process is gone, which the receiving thread reports
            self._wake_waiters()

    def _packets(self, items: list[Queued | Mark | Bookmark]) -> Iterator[bytes]:
        if self._bounds is not self._sent_bounds:
            self._sent_bounds = self._bounds
            yield packet(PacketKind.LIMITS, encoded(_limits(self._sent_bounds)))
        for each in items:
            if isinstance(each, Mark):
                self._num_marks += 1
                self._marks_by_number[self._num_marks] = each
                yield packet(PacketKind.MARK, encoded(self._num_marks))
            elif isinstance(each, Bookmark):
                yield packet(PacketKind.BOOKMARK, encode_bookmark(each))
            elif each.data is not None:
                yield from _message_parts(each.data)
            elif isinstance(each.message, tuple):
                yield packet(PacketKind.TEXTS, encoded(each.message))
            else:
                yield from _message_parts(encode(each.message))

    def _receive_statuses(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None, "a pipe"
        packets = PacketReader()
        with process.stdout as pipe:
            while data := os.read(pipe.fileno(), _READ_BYTES):
                for _, body in packets.feed(data):
                    self._apply_status(decode_status(body))
        code = process.wait()
        self._end("" if self._process is None else f"the process that writes it stopped ({code})")

    def _apply_status(self, status: RingStatus) -> None:
        self._status = status
        self._overview.extend(status.summaries)
        self._overview.extend(status.events)
        mark = self._marks_by_number.pop(status.mark, None)
        if isinstance(mark, _Flush):
            mark.is_flushed = status.is_flushed
        if mark is not None:
            mark.set()

    def _end(self, reason: str) -> None:
        self._end_reason = reason and f"ring folder {self.folder} takes no more: {reason}"
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        self._queue.close(discard=True)
        for number in list(self._marks_by_number):
            mark = self._marks_by_number.pop(number, None)
            if mark is not None:
                mark.set()

    def _delete(self) -> None:
        with contextlib.suppress(BadInput):  # already held by another process
            lock = hold(self.folder)
            delete_ring(self.folder)
            os.close(lock)


def _message_parts(data: bytes) -> tuple[bytes, bytes]:
    """Return the header and the body of a packet as two objects. Concatenating them would copy the snapshot of
    a large pool and thus delay drawing.
    """
    return head(PacketKind.MESSAGE, len(data)), data


def _limits(bounds: Bounds) -> RingLimits:
    return RingLimits(bounds.max_bytes, bounds.max_seconds)


def _write_all(out: int, parts: list[bytes]) -> None:
    """Write `parts` to the file descriptor `out` without copying, many per system call: thousands of calls or copies
    per second would delay drawing.
    """
    for begin in range(0, len(parts), _MAX_BUFFERS):
        buffers: list[bytes | memoryview] = [*parts[begin : begin + _MAX_BUFFERS]]
        first = 0
        while first < len(buffers):
            written = operating_system.write_buffers(out, buffers[first:])
            while first < len(buffers) and written >= len(buffers[first]):
                written -= len(buffers[first])
                first += 1
            if written:
                buffers[first] = memoryview(buffers[first])[written:]
