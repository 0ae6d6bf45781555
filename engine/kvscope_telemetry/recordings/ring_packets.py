"""What goes over the pipes between a session and the process that writes its ring: packets, a head and a body each.

Owns their layout. Both ends are of one version and trust each other. Knows neither the process nor the ring.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

import msgspec

from kvscope_telemetry.summaries.summary import Summary, TimedEvent
from kvscope_telemetry.texts.block_texts import RecordedText

_HEAD: Final = struct.Struct("<BQ")
"""Kind, bytes of the body."""


class PacketKind(IntEnum):
    """What a body is."""

    BEGIN = 0
    """`BeginRing`: the first of all."""
    MESSAGE = 1
    """Telemetry, as it came."""
    BOOKMARK = 2
    TEXTS = 3
    LIMITS = 4
    """`RingLimits`: from now on."""
    MARK = 5
    """`int`: tell once all before it can be read."""
    END = 6
    """`bool`: whether what was written stays."""
    TOLD = 7
    """`RingStatus`, the one that comes back."""


_KINDS: Final = tuple(PacketKind)


class RingLimits(msgspec.Struct, frozen=True):
    """How much is kept at most."""

    max_bytes: int
    max_seconds: float


class BeginRing(msgspec.Struct, frozen=True):
    """Which ring."""

    folder: str
    limits: RingLimits


class RingStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the ring stands, and what is new."""

    is_held: bool = False
    """Whether the folder is the ring's."""
    failure: str = ""
    num_bytes: int = 0
    origin_ns: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    num_dropped: int = 0
    summaries: list[Summary] = []
    events: list[TimedEvent] = []
    mark: int = 0
    """The one that was reached, 0 for none."""
    is_flushed: bool = False
    """Whether all before it was written."""
    pause: str = ""


_ENCODER: Final = msgspec.msgpack.Encoder()
_TOLD: Final = msgspec.msgpack.Decoder(RingStatus)
_TEXTS: Final = msgspec.msgpack.Decoder(tuple[RecordedText, ...])


def head(kind: PacketKind, num_bytes: int) -> bytes:
    """What goes before a body of so many bytes."""
    return _HEAD.pack(kind, num_bytes)


def packet(kind: PacketKind, body: bytes) -> bytes:
    """Both, ready to be written."""
    return head(kind, len(body)) + body


def encoded(item: object) -> bytes:
    """The body of anything but a message."""
    return _ENCODER.encode(item)


def decode_status(body: bytes) -> RingStatus:
    """What the process said."""
    return _TOLD.decode(body)


def decode_texts(body: bytes) -> tuple[RecordedText, ...]:
    """Texts of blocks."""
    return _TEXTS.decode(body)


class PacketReader:
    """Feed it what was read; it gives whole packets."""

    def __init__(self) -> None:
        self._read = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[PacketKind, bytes]]:
        """Those that are whole now, in order."""
        self._read += data
        begin, there = 0, len(self._read)
        with memoryview(self._read) as view:  # each body is copied once
            while begin + _HEAD.size <= there:
                kind, num_bytes = _HEAD.unpack_from(view, begin)
                end = begin + _HEAD.size + num_bytes
                if end > there:
                    break
                yield _KINDS[kind], bytes(view[begin + _HEAD.size : end])
                begin = end
        del self._read[:begin]
