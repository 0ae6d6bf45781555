"""A leap: several frames joined into one. It is in recordings alone; no engine sends it."""

from __future__ import annotations

from typing import Final

import msgspec

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages import validity
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES, Frame


class Leap(Frame, frozen=True, kw_only=True):
    """How all that changed between two frames stands after the second, which gives it number, step and time. What only
    happened in between (batches, timings, events, moves) is not in it."""

    since_seq: int = 0
    """The frame that it follows."""


_DECODER: Final = msgspec.msgpack.Decoder(Leap)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode_leap(leap: Leap) -> bytes:
    """As it lies in a recording."""
    return _ENCODER.encode(leap)


def decode_leap(data: bytes) -> Leap:
    """Checked as frames are. Raises ProtocolError."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a leap of {len(data)} bytes is refused: at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        leap = _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a leap that cannot be read: {str(error).splitlines()[0]}") from None
    check_leap(leap)
    return leap


def check_leap(leap: Leap) -> None:
    """Raise ProtocolError unless the leap is consistent in itself."""
    validity.check_frame(leap)
    if not 0 <= leap.since_seq < leap.seq:
        raise ProtocolError(f"a leap from frame {leap.since_seq} to frame {leap.seq}")
