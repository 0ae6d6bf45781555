"""Just enough of protobuf's encoding to write messages: fields of numbers, text, doubles and messages."""

from __future__ import annotations

import struct

_VARINT, _FIXED64, _BYTES = 0, 1, 2


def varint(value: int) -> bytes:
    """0 and up in groups of seven bits; below 0 as two's complement of 64 bits."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """An int, uint, enum or bool."""
    return varint(field << 3 | _VARINT) + varint(value)


def double(field: int, value: float) -> bytes:
    """A double."""
    return varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def fixed64(field: int, value: int) -> bytes:
    """A fixed64."""
    return varint(field << 3 | _FIXED64) + struct.pack("<Q", value)


def block(field: int, data: bytes) -> bytes:
    """A message, or bytes."""
    return varint(field << 3 | _BYTES) + varint(len(data)) + data


def text(field: int, value: str) -> bytes:
    """A string."""
    return block(field, value.encode("utf-8", "replace"))
