"""Encoding and decoding of messages, with one encoder, and one typed decoder per socket and direction.

All errors in received bytes are raised as ProtocolError with one line; msgspec's three kinds of exceptions
(DecodeError, UnicodeDecodeError, RecursionError) do not leave this module. Values of later versions are dropped and
counted. Nothing is unpickled. Must not depend on sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar, get_args

import msgspec
from msgspec.structs import fields

from kvscope_telemetry.errors import ProtocolError, UnknownMessage
from kvscope_telemetry.ledger import BlockRows
from kvscope_telemetry.messages import validity
from kvscope_telemetry.messages.commands import (
    MAX_COMMAND_BYTES,
    Command,
    Failed,
    Refused,
    Reply,
    RequestId,
    Status,
    Tag,
    Tokens,
)
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.unknown import Unknowns, known_reply, known_telemetry

_Message = TypeVar("_Message")


class _Tag(msgspec.Struct):
    type: str


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that identify a command. All others are skipped without validation."""

    type: Annotated[str, msgspec.Meta(max_length=64)] = ""
    request_id: RequestId = "-"
    tag: Tag = 0


# All are immutable and may be used from any thread.
_ENCODER: Final = msgspec.msgpack.Encoder()
_TELEMETRY: Final[msgspec.msgpack.Decoder[TelemetryMessage]] = msgspec.msgpack.Decoder(TelemetryMessage)
_COMMAND: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
_REPLY: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)
_PARTIAL_SNAPSHOT: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(
    msgspec.defstruct(
        Snapshot.__name__,
        [
            (f.name, msgspec.Raw if f.name == "blocks" else f.type, msgspec.field(default=f.default))
            for f in fields(Snapshot)
        ],
        tag=True,
        kw_only=True,
    )
)
"""Decoder of a snapshot that leaves the field `blocks` encoded."""
_VIEWS: Final = msgspec.msgpack.Decoder(dict[str, memoryview])
_LARGE_BYTES: Final = 1 << 20
_TAG: Final = msgspec.msgpack.Decoder(_Tag)
_HEAD: Final = msgspec.msgpack.Decoder(_Head)
_TAGS: Final = frozenset(kind.__name__ for union in (TelemetryMessage, Command, Reply) for kind in get_args(union))
_MAX_TAG_SHOWN: Final = 40


def encode(message: TelemetryMessage | Command | Reply) -> bytes:
    return _ENCODER.encode(message)


def decode_telemetry(data: bytes, unknowns: Unknowns | None = None) -> TelemetryMessage:
    """Return a checked message of the telemetry socket without unknown values, which are counted in `unknowns`.

    Raises ProtocolError; UnknownMessage for an unknown kind of message.
    """
    unknowns = Unknowns() if unknowns is None else unknowns
    return accepted(_decode(_TELEMETRY.decode, data, MAX_MESSAGE_BYTES, "telemetry message", unknowns), unknowns)


def decode_accepted(data: bytes) -> TelemetryMessage:
    """Return a message without checking it, because another process of kvscope has checked it with
    `decode_telemetry`.
    """
    return known_telemetry(
        _decode(_TELEMETRY.decode, data, MAX_MESSAGE_BYTES, "telemetry message", Unknowns()), Unknowns()
    )


def accepted(message: TelemetryMessage, unknowns: Unknowns) -> TelemetryMessage:
    """Return `message`, checked and without unknown values. Raises ProtocolError."""
    known = known_telemetry(message, unknowns)
    validity.check(known)
    return known


def decode_command(data: bytes) -> Command:
    """Return a client's command. Raises ProtocolError; UnknownMessage for a command of a later version."""
    return _decode(_COMMAND.decode, data, MAX_COMMAND_BYTES, "command", Unknowns())


def decode_reply(data: bytes, unknowns: Unknowns | None = None) -> Reply:
    """Return a checked reply of the engine. `unknowns` and errors are as in `decode_telemetry`."""
    unknowns = Unknowns() if unknowns is None else unknowns
    is_large = len(data) >= _LARGE_BYTES and tag_of(data) == Snapshot.__name__
    decode: Callable[[bytes], Reply] = _snapshot_by_columns if is_large else _REPLY.decode
    reply = _decode(decode, data, MAX_MESSAGE_BYTES, "reply", unknowns)
    if isinstance(reply, Tokens):  # nearly all are, and there is no word in them
        return reply
    message = known_reply(reply, unknowns)
    if isinstance(message, Snapshot):
        validity.check_snapshot(message)
    elif isinstance(message, Status) and message.hello is not None:
        validity.check_hello(message.hello)
    return message


def answer_unreadable(data: bytes, reason: str) -> Refused | Failed:
    """Return the reply to a command that cannot be decoded, so that its sender need not wait for a timeout.

    The reply is `Refused` with the request id of a `Submit`, else `Failed` with the command's tag, if it has one.
    """
    try:
        head = _HEAD.decode(data[: MAX_COMMAND_BYTES + 1])
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError):
        return Failed(reason=reason)
    if head.type == "Submit" and head.request_id != "-":
        return Refused(request_id=head.request_id, reason=reason)
    return Failed(reason=reason, tag=head.tag)


def tag_of(data: bytes) -> str:
    """Return the message type that `data` declares; empty if it declares none."""
    try:
        return _TAG.decode(data).type
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
        return ""


def _snapshot_by_columns(data: bytes) -> Snapshot:
    """Decode a snapshot one column at a time. Decoding a large pool in one call would block all other threads (GIL)."""
    parts = _PARTIAL_SNAPSHOT.decode(data)
    views = _VIEWS.decode(parts.blocks)
    blocks = BlockRows(**{f.name: bytes(views[f.encode_name]) for f in fields(BlockRows) if f.encode_name in views})
    others = {f.name: getattr(parts, f.name) for f in fields(Snapshot) if f.name != "blocks"}
    return Snapshot(blocks=blocks, **others)


def _decode(
    decode: Callable[[bytes], _Message], data: bytes, max_bytes: int, noun: str, unknowns: Unknowns
) -> _Message:
    if len(data) > max_bytes:
        raise ProtocolError(f"a {noun} of {len(data)} bytes is refused: at most {max_bytes} are accepted")
    try:
        return decode(data)
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a {noun} with text that is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise ProtocolError(f"a {noun} nested too deeply") from error
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        tag = tag_of(data)
        if tag and tag not in _TAGS:
            unknowns.messages += 1
            raise UnknownMessage(f"a {noun} {_shortened(tag)!r} is unknown to this version") from None
        raise ProtocolError(f"a {noun} that cannot be read: {_one_line(error)}") from error


def _shortened(tag: str) -> str:
    return tag if len(tag) <= _MAX_TAG_SHOWN else tag[:_MAX_TAG_SHOWN] + "…"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
