"""What the engine's thread is given to do: clients' commands, what is left of them, and what it needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvscope_engine.server.block_texts import BlockTextQuery
from kvscope_engine.server.preparation import Prepared
from kvscope_telemetry.messages.commands import Awaited, Command, GetAllocatorMap, GetBlockText, GetSnapshot


class ClientLost:
    """A client is gone, or does not read."""


@dataclass(frozen=True, slots=True)
class ClientJoined:
    """A client introduced itself, perhaps on another connection than before."""

    session: str
    owner: str
    awaited: tuple[Awaited, ...]


class Tick:
    """Time went by."""


Work: TypeAlias = Command | Prepared | BlockTextQuery | ClientLost | ClientJoined | Tick
ReceivedCommand: TypeAlias = tuple[bytes, Work]
"""A client and what it wants."""


def command_of(work: Work) -> Command | None:
    """The command behind a piece of work that is still to be answered."""
    if isinstance(work, BlockTextQuery):
        return work.command
    return None if isinstance(work, Prepared | ClientLost | ClientJoined | Tick) else work


def is_question(work: Work) -> bool:
    """Whether it only asks: its answer is for the connection that it came on, and changes nothing."""
    return isinstance(work, GetSnapshot | GetBlockText | GetAllocatorMap | BlockTextQuery)
