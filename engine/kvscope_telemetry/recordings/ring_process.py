"""Process that writes a ring: `python -m kvscope_telemetry.recordings.ring_process`, with packets on stdin and stdout.

Owns the ring, and the status that it reports on stdout. If stdin closes without an END packet, the session has crashed:
the written files stay, and the next start finds them. Runs at low priority, so that it does not delay drawing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.wire import decode_accepted
from kvscope_telemetry.operating_system import set_low_priority
from kvscope_telemetry.recordings.ring import Ring
from kvscope_telemetry.recordings.ring_packets import (
    BeginRing,
    PacketKind,
    PacketReader,
    RingLimits,
    RingStatus,
    decode_texts,
    encoded,
    packet,
)
from kvscope_telemetry.summaries.bookmark import decode_bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent

NICENESS: Final = 10
READ_BYTES: Final = 1 << 20
MAX_QUEUED_READS: Final = 4
"""Maximum number of reads from the session that are not yet processed. The session then waits."""
STATUS_INTERVAL_S: Final = 0.25
FLUSH_S: Final = 120.0
"""Timeout of a flush, much longer than that of the session that requested it."""


class RingServer:
    """Receives packets from the file descriptor `source` and sends status packets to the file descriptor `out`."""

    def __init__(self, source: int, out: int) -> None:
        self._source, self._out = source, out
        self._reads: queue.Queue[bytes] = queue.Queue(MAX_QUEUED_READS)
        self._packets = PacketReader()
        self._ring: Ring | None = None
        self._is_held = False
        self._last_status = RingStatus()
        self._reported_s = 0.0

    def run(self) -> None:
        is_kept = True
        threading.Thread(target=self._read, name="kvscope-ring-input", daemon=True).start()
        while True:
            data = self._next_read()
            if data is not None:
                end_bodies = self._process_all(data) if data else [True]
                if end_bodies:
                    is_kept = end_bodies[0]
                    break
            if time.monotonic() - self._reported_s >= STATUS_INTERVAL_S:
                self._send_status()
        if self._ring is not None:
            self._ring.close(keep=is_kept)
        self._send_status()

    def _next_read(self) -> bytes | None:
        """Return what the session sent next, b"" at the end, or None if it sent nothing for `STATUS_INTERVAL_S`."""
        try:
            return self._reads.get(timeout=STATUS_INTERVAL_S)
        except queue.Empty:
            return None

    def _read(self) -> None:
        """Queue what the session sends, and an empty read at the end. A thread, because Windows cannot wait for a pipe
        and a time at once.
        """
        data = b"-"
        while data:
            try:
                data = os.read(self._source, READ_BYTES)
            except OSError:
                data = b""
            self._reads.put(data)

    def _process_all(self, data: bytes) -> list[bool]:
        """Process the packets in `data`. Returns the content of the END packet (whether to keep the files) as a
        list, which is empty if no END packet arrived.
        """
        for kind, body in self._packets.feed(data):
            if kind is PacketKind.END:
                return [msgspec.msgpack.decode(body, type=bool)]
            self._process(kind, body)
        return []

    def _process(self, kind: PacketKind, body: bytes) -> None:
        if kind is PacketKind.BEGIN:
            begin = msgspec.msgpack.decode(body, type=BeginRing)
            limits = begin.limits
            self._ring = Ring(Path(begin.folder), max_bytes=limits.max_bytes, max_seconds=limits.max_seconds)
            self._is_held = not self._ring.failure
            self._send_status()
        ring = self._ring
        assert ring is not None, "it begins with the ring"
        if kind is PacketKind.MESSAGE:
            with contextlib.suppress(ProtocolError):  # the session decoded and reported it
                ring.write(decode_accepted(body), body, wait=True)
        elif kind is PacketKind.BOOKMARK:
            ring.add_bookmark(decode_bookmark(body))
        elif kind is PacketKind.TEXTS:
            ring.write_texts(decode_texts(body))
        elif kind is PacketKind.LIMITS:
            limits = msgspec.msgpack.decode(body, type=RingLimits)
            ring.set_bounds(max_bytes=limits.max_bytes, max_seconds=limits.max_seconds)
        elif kind is PacketKind.MARK:
            is_flushed = ring.flush(FLUSH_S)
            self._send_status(msgspec.msgpack.decode(body, type=int), is_flushed=is_flushed)

    def _send_status(self, mark: int = 0, *, is_flushed: bool = False) -> None:
        ring = self._ring
        if ring is None:
            return
        overview = ring.drain_overview()
        status = RingStatus(
            is_held=self._is_held,
            failure=ring.failure,
            num_bytes=ring.num_bytes,
            origin_ns=ring.origin_ns,
            start_ns=ring.start_ns,
            end_ns=ring.end_ns,
            num_dropped=ring.num_dropped,
            summaries=[item for item in overview if isinstance(item, Summary)],
            events=[item for item in overview if isinstance(item, TimedEvent)],
            mark=mark,
            is_flushed=is_flushed,
            pause=ring.pause,
        )
        self._reported_s = time.monotonic()
        if status != self._last_status:
            self._last_status = status
            self._write(packet(PacketKind.STATUS, encoded(status)))

    def _write(self, data: bytes) -> None:
        unsent = memoryview(data)
        with contextlib.suppress(OSError):  # the session is gone: the input will end
            while unsent:
                unsent = unsent[os.write(self._out, unsent) :]


def main() -> None:
    with contextlib.suppress(OSError):
        set_low_priority(NICENESS)
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps printed text out of the packet stream
    RingServer(sys.stdin.fileno(), out).run()


if __name__ == "__main__":
    main()
