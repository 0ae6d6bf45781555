"""Who may do what: the two roles, and which commands each may give.

A viewer sees frames, snapshots, how the engine is and how its memory is divided. An operator also submits, stops,
controls and reads the texts of blocks. Knows neither keys nor sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvscope_telemetry.messages.commands import Command, GetAllocatorMap, GetSnapshot, GetStatus, Reply, refuse


class Role(StrEnum):
    """What somebody is to an engine."""

    VIEWER = "viewer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who gives a command: `public_key` (Z85) is empty where no keys are used."""

    name: str
    role: Role
    public_key: str = ""


UNKNOWN_KEY: Final = "the engine no longer accepts this key"
FOR_ALL: Final = (GetStatus, GetSnapshot, GetAllocatorMap)
"""Commands that everybody may give; all others, also those still to be invented, are for operators."""


def not_allowed(caller: Caller | None, command: Command) -> Reply | None:
    """The negative answer to a command that `caller` may not give, None for one that it may. None may nothing."""
    if caller is None:
        return refuse(command, UNKNOWN_KEY)
    if caller.role is Role.OPERATOR or isinstance(command, FOR_ALL):
        return None
    what = type(command).__name__
    return refuse(command, f"{what} is for operators: {caller.name!r} is a viewer at this engine")
