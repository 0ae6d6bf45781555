"""The answer to a command that cannot be read: it carries the command's id or tag where those can be.

A client that waits for an answer to its request hears that it was refused, instead of waiting for ever.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvscope_telemetry.messages.commands import MAX_COMMAND_BYTES, Failed, Refused, RequestId, Tag


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """What names a command; everything else is skipped, whatever it is."""

    type: Annotated[str, msgspec.Meta(max_length=64)] = ""
    request_id: RequestId = "-"
    tag: Tag = 0


_HEAD = msgspec.msgpack.Decoder(_Head)


def answer_unreadable(data: bytes, reason: str) -> Refused | Failed:
    """`Refused` with the id of a submission, else `Failed` with the tag of a command, where they have one."""
    try:
        head = _HEAD.decode(data[: MAX_COMMAND_BYTES + 1])
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError):
        return Failed(reason=reason)
    if head.type == "Submit" and head.request_id != "-":
        return Refused(request_id=head.request_id, reason=reason)
    return Failed(reason=reason, tag=head.tag)
