"""The process that writes a ring: `python -m kvscope_telemetry.recordings.ring_process`, with packets on its input.

Owns the ring in it and what is told of it on the output. When the input ends without a word the session is gone: what
was written stays, for the next start to find. Its priority is low: whoever draws comes first.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.wire import decode_accepted
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
TELL_S: Final = 0.25
FLUSH_S: Final = 120.0
"""Who asked has given up long before."""


class RingServer:
    """Takes packets from `source` and tells on `out`, both file descriptors, until `run` returns."""

    def __init__(self, source: int, out: int) -> None:
        self._source, self._out = source, out
        self._packets = PacketReader()
        self._ring: Ring | None = None
        self._is_held = False
        self._last = RingStatus()
        self._reported_s = 0.0

    def run(self) -> None:
        """Until the input ends, or says so."""
        keep = True
        while True:
            if select.select([self._source], [], [], TELL_S)[0]:
                data = os.read(self._source, READ_BYTES)
                ends = self._take_all(data) if data else [True]
                if ends:
                    keep = ends[0]
                    break
            if time.monotonic() - self._reported_s >= TELL_S:
                self._tell()
        if self._ring is not None:
            self._ring.close(keep=keep)
        self._tell()

    def _take_all(self, data: bytes) -> list[bool]:
        """What the end said, if it came."""
        for kind, body in self._packets.feed(data):
            if kind is PacketKind.END:
                return [msgspec.msgpack.decode(body, type=bool)]
            self._take(kind, body)
        return []

    def _take(self, kind: PacketKind, body: bytes) -> None:
        if kind is PacketKind.BEGIN:
            begin = msgspec.msgpack.decode(body, type=BeginRing)
            limits = begin.limits
            self._ring = Ring(Path(begin.folder), max_bytes=limits.max_bytes, max_seconds=limits.max_seconds)
            self._is_held = not self._ring.failure
            self._tell()
        ring = self._ring
        assert ring is not None, "it begins with the ring"
        if kind is PacketKind.MESSAGE:
            with contextlib.suppress(ProtocolError):  # the session has read it
                ring.write(decode_accepted(body), body, wait=True)
        elif kind is PacketKind.BOOKMARK:
            ring.mark(decode_bookmark(body))
        elif kind is PacketKind.TEXTS:
            ring.write_texts(decode_texts(body))
        elif kind is PacketKind.LIMITS:
            limits = msgspec.msgpack.decode(body, type=RingLimits)
            ring.set_bounds(max_bytes=limits.max_bytes, max_seconds=limits.max_seconds)
        elif kind is PacketKind.MARK:
            is_flushed = ring.flush(FLUSH_S)
            self._tell(msgspec.msgpack.decode(body, type=int), is_flushed=is_flushed)

    def _tell(self, mark: int = 0, *, is_flushed: bool = False) -> None:
        """How it stands, where that is news."""
        ring = self._ring
        if ring is None:
            return
        overview = ring.take_overview()
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
        if status != self._last:
            self._last = status
            self._say(packet(PacketKind.TOLD, encoded(status)))

    def _say(self, data: bytes) -> None:
        rest = memoryview(data)
        with contextlib.suppress(OSError):  # nobody listens: the input will end
            while rest:
                rest = rest[os.write(self._out, rest) :]


def main() -> None:
    """Serve the pipes that this process was started with."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints does not get between the packets
    RingServer(sys.stdin.fileno(), out).run()


if __name__ == "__main__":
    main()
