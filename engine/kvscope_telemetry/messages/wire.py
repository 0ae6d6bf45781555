"""Bytes to messages and back: one encoder, and one typed decoder for each socket and direction.

Everything that can be wrong with received bytes comes out as ProtocolError in one line; msgspec's own three
families (DecodeError, UnicodeDecodeError, RecursionError) do not leave this file. Nothing is ever unpickled.
Knows no sockets.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages import validity
from kvscope_telemetry.messages.commands import MAX_COMMAND_BYTES, Command, Reply, Status
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES, Snapshot, TelemetryMessage

_Message = TypeVar("_Message")

# All four are immutable and may be used from any thread.
_ENCODER: Final = msgspec.msgpack.Encoder()
_TELEMETRY: Final[msgspec.msgpack.Decoder[TelemetryMessage]] = msgspec.msgpack.Decoder(TelemetryMessage)
_COMMAND: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
_REPLY: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)


def encode(message: TelemetryMessage | Command | Reply) -> bytes:
    """The wire form of any message."""
    return _ENCODER.encode(message)


def decode_telemetry(data: bytes) -> TelemetryMessage:
    """A message of the telemetry socket, checked. Raises ProtocolError."""
    message = _decode(_TELEMETRY, data, MAX_MESSAGE_BYTES, "telemetry message")
    validity.check(message)
    return message


def decode_command(data: bytes) -> Command:
    """What a client asks. Raises ProtocolError."""
    return _decode(_COMMAND, data, MAX_COMMAND_BYTES, "command")


def decode_reply(data: bytes) -> Reply:
    """What the engine answers, checked. Raises ProtocolError."""
    message = _decode(_REPLY, data, MAX_MESSAGE_BYTES, "reply")
    if isinstance(message, Snapshot):
        validity.check_snapshot(message)
    elif isinstance(message, Status) and message.hello is not None:
        validity.check_hello(message.hello)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[_Message], data: bytes, max_bytes: int, what: str) -> _Message:
    if len(data) > max_bytes:
        raise ProtocolError(f"a {what} of {len(data)} bytes is refused: at most {max_bytes} are accepted")
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a {what} with text that is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise ProtocolError(f"a {what} nested too deep") from error
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a {what} that cannot be read: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
