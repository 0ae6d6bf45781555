"""Encodes the packets of a Perfetto trace that we write: tracks, slices, instants, counters.

Owns the field numbers, which are those of perfetto's `protos/perfetto/trace` (`trace_packet.proto`,
`clock_snapshot.proto` and, of `track_event`, `track_event.proto`, `track_descriptor.proto`, `counter_descriptor.proto`
and `debug_annotation.proto`). A test parses the output with perfetto's own definitions. Times are nanoseconds since
1970.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

_VARINT, _FIXED64, _BYTES = 0, 1, 2


# The part of protobuf's encoding that is needed to write messages: numbers, text, doubles and messages.
def varint(value: int) -> bytes:
    """Encode an integer in groups of seven bits. Negative values are encoded as 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    return varint(field << 3 | _VARINT) + varint(value)


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def fixed64(field: int, value: int) -> bytes:
    return varint(field << 3 | _FIXED64) + struct.pack("<Q", value)


def block(field: int, data: bytes) -> bytes:
    return varint(field << 3 | _BYTES) + varint(len(data)) + data


def text(field: int, value: str) -> bytes:
    return block(field, value.encode("utf-8", "replace"))


_SEQUENCE: Final = number(10, 1)  # TracePacket.trusted_packet_sequence_id
_REALTIME, _BOOTTIME = 1, 6
_SLICE_BEGIN, _SLICE_END, _INSTANT, _COUNTER = 1, 2, 3, 4
_EXPLICIT_ORDER: Final = 3
_NEVER_MERGED: Final = number(15, 2)  # TrackDescriptor.sibling_merge_behavior: names need not be unique
Values = Mapping[str, str | int | float]


def clock(time_ns: int) -> bytes:
    """Encode a clock snapshot that maps the trace's clock to the wall clock, so that the viewer can show UTC."""
    clocks = b"".join(block(1, number(1, clock_id) + number(2, time_ns)) for clock_id in (_BOOTTIME, _REALTIME))
    return _packet(block(6, clocks), time_ns)


def process_track(uuid: int, name: str, pid: int) -> bytes:
    """Encode the engine's track, the parent of all others."""
    process = block(3, number(1, pid) + text(6, name))
    return _packet(block(60, number(1, uuid) + process + number(11, _EXPLICIT_ORDER)))


def track(uuid: int, parent: int, name: str, rank: int = 0, *, merges: bool = False) -> bytes:
    """Encode a track of slices and instants. Tracks with the same name and `merges` are shown as one."""
    return _packet(
        block(
            60,
            number(1, uuid)
            + text(2, name)
            + number(5, parent)
            + number(11, _EXPLICIT_ORDER)
            + number(12, rank)
            + (b"" if merges else _NEVER_MERGED),
        )
    )


def counter_track(uuid: int, parent: int, name: str, unit: str, rank: int = 0) -> bytes:
    counter = block(8, text(6, unit) if unit else b"")
    return _packet(block(60, number(1, uuid) + text(2, name) + number(5, parent) + counter + number(12, rank)))


def slice_begin(uuid: int, time_ns: int, name: str, category: str, values: Values, flow: int = 0) -> bytes:
    """Encode the start of a slice. A `flow` other than 0 draws the end of the arrow with that id."""
    arrow = fixed64(48, flow) if flow else b""
    return _event(_SLICE_BEGIN, uuid, time_ns, text(22, category) + text(23, name) + _annotated(values) + arrow)


def slice_end(uuid: int, time_ns: int) -> bytes:
    return _event(_SLICE_END, uuid, time_ns, b"")


def instant(uuid: int, time_ns: int, name: str, category: str, values: Values, flow: int = 0) -> bytes:
    """Encode an instant. A `flow` other than 0 draws the start of the arrow with that id."""
    arrow = fixed64(47, flow) if flow else b""
    return _event(_INSTANT, uuid, time_ns, text(22, category) + text(23, name) + _annotated(values) + arrow)


def counter(uuid: int, time_ns: int, value: float) -> bytes:
    return _event(_COUNTER, uuid, time_ns, double(44, value))


def _event(kind: int, uuid: int, time_ns: int, rest: bytes) -> bytes:
    return _packet(block(11, number(9, kind) + number(11, uuid) + rest), time_ns)


def _packet(data: bytes, time_ns: int | None = None) -> bytes:
    timed = b"" if time_ns is None else number(8, max(0, time_ns))
    return block(1, timed + _SEQUENCE + data)


def _annotated(values: Values) -> bytes:
    return b"".join(block(4, text(10, name) + _value(value)) for name, value in values.items())


def _value(value: str | float) -> bytes:
    if isinstance(value, str):
        return text(6, value)
    return number(4, value) if isinstance(value, int) else double(5, value)
