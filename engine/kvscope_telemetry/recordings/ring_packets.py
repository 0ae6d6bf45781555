"""Packets that a session and the process that writes its ring exchange through pipes. Each has a header and a body.

Owns their layout. Both ends have the same version and trust each other. Must not depend on the process or the ring.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

import msgspec

from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.summaries.summary import Summary, TimedEvent

_HEAD: Final = struct.Struct("<BQ")


class PacketKind(IntEnum):
    BEGIN = 0
    """First packet. Its body is a `BeginRing`."""
    MESSAGE = 1
    """A telemetry message in its original encoding."""
    BOOKMARK = 2
    TEXTS = 3
    LIMITS = 4
    MARK = 5
    """Flush marker. The body is the marker's number, an `int`. The ring's process reports that number once
    everything sent before the marker is readable.
    """
    END = 6
    """Last packet. The body is a `bool`: whether to keep the written files."""
    STATUS = 7
    """Status from the process to the session, a `RingStatus`. All other packets go in the opposite direction."""


_KINDS: Final = tuple(PacketKind)


class RingLimits(msgspec.Struct, frozen=True):
    max_bytes: int
    max_seconds: float


class BeginRing(msgspec.Struct, frozen=True):
    folder: str
    limits: RingLimits


class RingStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    is_held: bool = False
    failure: str = ""
    num_bytes: int = 0
    origin_ns: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    num_dropped: int = 0
    summaries: list[Summary] = []
    events: list[TimedEvent] = []
    mark: int = 0
    """Number of the flush marker (`PacketKind.MARK`) to which this status responds; 0 if it responds to none."""
    is_flushed: bool = False
    """Whether everything sent before that flush marker was written and is readable."""
    pause: str = ""


_ENCODER: Final = msgspec.msgpack.Encoder()
_STATUS_DECODER: Final = msgspec.msgpack.Decoder(RingStatus)
_TEXTS_DECODER: Final = msgspec.msgpack.Decoder(tuple[RecordedText, ...])


def head(kind: PacketKind, num_bytes: int) -> bytes:
    return _HEAD.pack(kind, num_bytes)


def packet(kind: PacketKind, body: bytes) -> bytes:
    return head(kind, len(body)) + body


def encoded(item: object) -> bytes:
    return _ENCODER.encode(item)


def decode_status(body: bytes) -> RingStatus:
    return _STATUS_DECODER.decode(body)


def decode_texts(body: bytes) -> tuple[RecordedText, ...]:
    return _TEXTS_DECODER.decode(body)


class PacketReader:
    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[PacketKind, bytes]]:
        """Add `data` and yield the packets that are complete, in order."""
        self._buffer += data
        begin, num_bytes_buffered = 0, len(self._buffer)
        with memoryview(self._buffer) as view:  # copies each body only once
            while begin + _HEAD.size <= num_bytes_buffered:
                kind, num_bytes = _HEAD.unpack_from(view, begin)
                end = begin + _HEAD.size + num_bytes
                if end > num_bytes_buffered:
                    break
                yield _KINDS[kind], bytes(view[begin + _HEAD.size : end])
                begin = end
        del self._buffer[:begin]
