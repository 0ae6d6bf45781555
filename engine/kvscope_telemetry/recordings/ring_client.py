"""A ring that another process writes: what packing and writing cost, the threads of this one do not wait for.

Owns the process, the two threads that speak with it and what it told last. Packing frames is Python: in this process
it would hold the interpreter's lock half of the time at thousands of frames a second, and a window that draws waits
for it at each turn. And whatever ends this process, the other still writes all that it was given.

See docs/internals/decisions/0005-recent-history-has-its-own-process.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Final

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
from kvscope_telemetry.recordings.writer import MAX_TOLD
from kvscope_telemetry.summaries.bookmark import Bookmark, encode_bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent
from kvscope_telemetry.texts.block_texts import RecordedText

COMMAND: Final = (sys.executable, "-P", "-m", "kvscope_telemetry.recordings.ring_process")
_LOOK_S: Final = 1.0
_READ_BYTES: Final = 1 << 18
_MANY_PARTS: Final = 512
"""Systems take 1,024 in one call."""
_PIPE_BYTES: Final = 1 << 20
"""What gathers before there is a hurry: it goes over in one go where the system allows a pipe so much."""


class _Flush(Mark):
    """A mark that knows what became of it."""

    is_flushed = False


class RingClient:
    """As `Ring`, in `folder`; what it tells of itself is up to a quarter of a second old.

    Raises BadInput for bounds that make no sense; all else that is wrong is told in `failure`, soon.
    """

    def __init__(self, folder: Path | str, *, max_bytes: int = MAX_BYTES, max_seconds: float = MAX_SECONDS) -> None:
        self.folder: Final = Path(folder)
        """Where it is."""
        self._bounds = self._sent_bounds = Bounds(max_bytes, max_seconds)
        self._queue = RecordingQueue()
        self._status = RingStatus()
        self._overview: deque[Summary | TimedEvent] = deque(maxlen=MAX_TOLD)
        self._marks: dict[int, Mark] = {}
        self._num_marks = 0
        self._ended = ""
        self._keeps = False
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: tuple[threading.Thread, ...] = ()
        try:
            self._start()
        except OSError as error:
            self._end(f"the process that writes it cannot be started: {error.strerror or error}")

    @property
    def pid(self) -> int:
        """Of the process that writes, 0 where there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def failure(self) -> str:
        """Why nothing more is kept, for a person; empty while all is well. What was kept until then can be read."""
        return self._status.failure or self._ended

    @property
    def pause(self) -> str:
        """Why nothing is kept for now, for a person: it begins again by itself. Empty while all is well."""
        return "" if self.failure else self._status.pause

    @property
    def num_bytes(self) -> int:
        """On the disk, as of the last second."""
        return self._status.num_bytes

    @property
    def origin_ns(self) -> int | None:
        """When it began, by the wall clock, even if that is no longer there; None before there is anything."""
        return self._status.origin_ns

    @property
    def start_ns(self) -> int | None:
        """When what is left of it begins, by the wall clock; None before there is anything."""
        return self._status.start_ns

    @property
    def end_ns(self) -> int | None:
        """When what was written last was, by the wall clock."""
        return self._status.end_ns

    @property
    def num_dropped(self) -> int:
        """Messages that are not in it: the queue was full, or it had ended."""
        return self._queue.num_refused + self._status.num_dropped

    @property
    def bounds(self) -> Bounds:
        """How much is kept at most."""
        return self._bounds

    def take_overview(self) -> list[Summary | TimedEvent]:
        """What was summarized since the last call: of each second its summary, then its events."""
        return [self._overview.popleft() for _ in range(len(self._overview))]

    def set_bounds(self, *, max_bytes: int, max_seconds: float) -> None:
        """Keep so much at most from now on. Raises BadInput for what makes no sense."""
        self._bounds = Bounds(max_bytes, max_seconds)
        self._queue.put_mark(Mark())  # the sender looks

    def write(self, message: TelemetryMessage, data: bytes | None = None, *, wait: bool = False) -> bool:
        """As `Ring.write`: never blocks without `wait`, never raises. False: it is not in the ring."""
        if self.failure:
            return False
        return self._queue.put(message, None, wait=wait) if data is None else self._queue.put_bytes(data, wait=wait)

    def mark(self, bookmark: Bookmark) -> bool:
        """Write what is said of a bookmark, among the messages."""
        return not self.failure and self._queue.put_bookmark(bookmark)

    def write_texts(self, texts: Iterable[RecordedText]) -> bool:
        """What blocks hold, where a person agreed that it is kept."""
        taken = tuple(texts)
        return not self.failure and (not taken or self._queue.put_texts(taken, wait=False))

    def flush(self, timeout_s: float = FLUSH_WAIT_S) -> bool:
        """Let readers see all that was given up to now; whether that was done in time."""
        mark = _Flush()
        self._queue.put_mark(mark)
        return mark.wait(timeout_s) and mark.is_flushed

    def close(self, *, keep: bool = False) -> None:
        """Let go of the folder; it is deleted unless `keep`, which writes what waits first. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        self._keeps = keep
        is_ours = self._status.is_held
        if is_ours and not keep:
            process.kill()  # what it writes is of no use to anybody
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
            # Ctrl-C in the terminal is the session's, which ends this. Not a session of its own: Linux shares processor
            # time out among those first, and a low priority would count for nothing.
            process_group=0,
        )
        assert process.stdin is not None, "a pipe"
        self._process = process
        with contextlib.suppress(OSError, AttributeError):  # AttributeError: a system whose pipes have one size
            fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        sender = threading.Thread(target=self._send, args=(process.stdin,), name="kvscope-ring", daemon=True)
        hearer = threading.Thread(target=self._hear, args=(process,), name="kvscope-ring-told", daemon=True)
        self._threads = (sender, hearer)
        for thread in self._threads:
            thread.start()

    def _send(self, pipe: IO[bytes]) -> None:
        """The thread that gives."""
        try:
            with pipe:
                pipe.write(packet(PacketKind.BEGIN, encoded(BeginRing(str(self.folder), _limits(self._bounds)))))
                pipe.flush()
                while (taken := self._queue.take(_LOOK_S)) is not None:
                    _write_all(pipe.fileno(), list(self._parts(taken)))
                pipe.write(packet(PacketKind.END, encoded(self._keeps)))
        except OSError:  # the other end is gone, which the hearer tells
            self._let_go()

    def _parts(self, taken: list[Queued | Mark | Bookmark]) -> Iterator[bytes]:
        if self._bounds is not self._sent_bounds:
            self._sent_bounds = self._bounds
            yield packet(PacketKind.LIMITS, encoded(_limits(self._sent_bounds)))
        for each in taken:
            if isinstance(each, Mark):
                self._num_marks += 1
                self._marks[self._num_marks] = each
                yield packet(PacketKind.MARK, encoded(self._num_marks))
            elif isinstance(each, Bookmark):
                yield packet(PacketKind.BOOKMARK, encode_bookmark(each))
            elif each.data is not None:
                yield from _message_parts(each.data)
            elif isinstance(each.message, tuple):
                yield packet(PacketKind.TEXTS, encoded(each.message))
            else:
                yield from _message_parts(encode(each.message))

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        """The thread that listens, until the other end is gone."""
        assert process.stdout is not None, "a pipe"
        packets = PacketReader()
        with process.stdout as pipe:
            while data := os.read(pipe.fileno(), _READ_BYTES):
                for _, body in packets.feed(data):
                    self._take(decode_status(body))
        code = process.wait()
        self._end("" if self._process is None else f"the process that writes it stopped ({code})")

    def _take(self, status: RingStatus) -> None:
        self._status = status
        self._overview.extend(status.summaries)
        self._overview.extend(status.events)
        mark = self._marks.pop(status.mark, None)
        if isinstance(mark, _Flush):
            mark.is_flushed = status.is_flushed
        if mark is not None:
            mark.set()

    def _end(self, reason: str) -> None:
        """Nothing more is taken."""
        self._ended = reason and f"ring folder {self.folder} takes no more: {reason}"
        self._let_go()

    def _let_go(self) -> None:
        """Nobody waits any longer for what does not come."""
        self._queue.close(discard=True)
        for number in list(self._marks):
            mark = self._marks.pop(number, None)
            if mark is not None:
                mark.set()

    def _delete(self) -> None:
        with contextlib.suppress(BadInput):  # somebody else has it already
            lock = hold(self.folder)
            delete_ring(self.folder)
            os.close(lock)


def _message_parts(data: bytes) -> tuple[bytes, bytes]:
    """Not joined: to copy a snapshot of a large pool holds up whoever draws."""
    return head(PacketKind.MESSAGE, len(data)), data


def _limits(bounds: Bounds) -> RingLimits:
    return RingLimits(bounds.max_bytes, bounds.max_seconds)


def _write_all(out: int, parts: list[bytes]) -> None:
    """As they are, many at a time: thousands of small calls a second would hold up whoever draws, and copying too."""
    for begin in range(0, len(parts), _MANY_PARTS):
        rest: list[bytes | memoryview] = [*parts[begin : begin + _MANY_PARTS]]
        first = 0
        while first < len(rest):
            written = os.writev(out, rest[first:])
            while first < len(rest) and written >= len(rest[first]):
                written -= len(rest[first])
                first += 1
            if written:
                rest[first] = memoryview(rest[first])[written:]
