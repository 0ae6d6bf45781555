"""The two roles of clients, and the commands that each may send.

A viewer may receive frames, snapshots, the engine's status and the map of its memory. An operator may also submit and
abort requests, control the engine and read the texts of blocks. Must not depend on keys or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvscope_telemetry.messages.commands import Command, GetAllocatorMap, GetSnapshot, GetStatus, Reply, refuse


class Role(StrEnum):
    VIEWER = "viewer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a command. `public_key` (Z85) is empty if the engine uses no keys."""

    name: str
    role: Role
    public_key: str = ""


UNKNOWN_KEY: Final = "the engine no longer accepts this key"
VIEWER_COMMANDS: Final = (GetStatus, GetSnapshot, GetAllocatorMap)
"""Commands that all roles may send. All others, including any added later, require the operator role."""


def not_allowed(caller: Caller | None, command: Command) -> Reply | None:
    """Return the negative reply if `caller` may not send `command`, else None. The caller None may send no command."""
    if caller is None:
        return refuse(command, UNKNOWN_KEY)
    if caller.role is Role.OPERATOR or isinstance(command, VIEWER_COMMANDS):
        return None
    name = type(command).__name__
    return refuse(command, f"{name} is for operators: {caller.name!r} is a viewer at this engine")
