"""Clients' interventions: carried out by the engine, with whose a pin is and what everybody is told of it.

Owns the pins of clients and the steps that are asked for one by one. Every method runs on the engine's thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from kvscope_engine.server.command_desk import CommandDesk, Told
from kvscope_engine.server.debugging.pin_book import PinBook
from kvscope_engine.server.debugging.single_steps import SingleSteps
from kvscope_engine.server.served_engine import ServedEngine
from kvscope_telemetry.messages.commands import (
    Control,
    Done,
    Evict,
    Intervention,
    Pin,
    Preempt,
    Reply,
    SetLimits,
    Unpin,
    refuse,
)


class Intervening:
    """One for an engine. `reply` is for what is answered later, `name_of` says what a client is called."""

    def __init__(
        self,
        engine: ServedEngine,
        desk: CommandDesk,
        reply: Callable[[bytes, Reply], None],
        name_of: Callable[[bytes], str],
    ) -> None:
        self.steps = SingleSteps(reply)
        self._engine = engine
        self._desk = desk
        self._name_of = name_of
        self._pins = PinBook()
        self._tell()

    @property
    def holders(self) -> list[bytes]:
        """Clients whose going away changes something."""
        return self._pins.holders

    def do(self, client: bytes, command: Intervention) -> Reply:
        """Do it and say what was done. Raises BadInput with the reason where it cannot be."""
        what = self._do(client, command)
        self._tell()
        return Done(tag=command.tag, what=what)

    def step(self, client: bytes, command: Control) -> Reply | None:
        """Run steps though somebody holds them; None: it is answered when they ran."""
        if not self._desk.paused:
            return refuse(command, "nobody holds the engine's steps: they run by themselves")
        if not self._engine.num_unfinished:
            return refuse(command, "no request is unfinished: there is no step to run")
        self.steps.ask(client, command.tag, command.num_steps)
        return None

    @property
    def asked_by(self) -> str:
        """Who asked for the single step that comes next, by name."""
        return "" if self.steps.first is None else self._name_of(self.steps.first)

    def stepped(self) -> None:
        """A step ran."""
        if not self.steps.any:
            return
        self.steps.ran(self._engine.step_count)
        if not self._engine.num_unfinished:
            self.steps.end(self._engine.step_count, "no request is unfinished any more")

    def look_at_holders(self) -> None:
        """Who holds the engine may have let it go."""
        if not self._desk.paused and self.steps.any:
            self.steps.end(self._engine.step_count, "the engine goes on by itself")

    def reset(self) -> None:
        """The prefix cache was emptied: no block is pinned any more."""
        self._pins.clear()
        self._tell()

    def lose(self, client: bytes) -> None:
        """A client is gone, and what it pinned is let go."""
        self.steps.forget(client)
        name = self._pins.name(client)
        _, blocks = self._pins.take(client)
        self._engine.interventions.unpin(blocks, name)
        self._tell()
        self.look_at_holders()

    def _do(self, client: bytes, command: Intervention) -> str:
        does, by = self._engine.interventions, self._name_of(client)
        if isinstance(command, Preempt):
            return does.preempt(command.number, command.how, by)
        if isinstance(command, Pin):
            blocks = does.pin(command.blocks, by, with_prefix=command.with_prefix)
            self._pins.add(client, by, blocks)
            left = "" if command.with_prefix or len(blocks) == len(set(command.blocks)) else "; others hold no prefix"
            return f"{_blocks(len(blocks))} pinned while you are here{left}"
        if isinstance(command, Unpin):
            return self._unpin(client, command)
        if isinstance(command, Evict):
            return does.evict(command.blocks, by)
        assert isinstance(command, SetLimits), f"{command} is no intervention"
        return does.set_limits(command.max_num_seqs, command.max_num_batched_tokens, by)

    def _unpin(self, client: bytes, command: Unpin) -> str:
        total = 0
        for holder in self._pins.holders if command.anyones else [client]:
            name = self._pins.name(holder)
            count, blocks = self._pins.take(holder, command.blocks)
            self._engine.interventions.unpin(blocks, name)
            total += count
        left = len(set(command.blocks) & set(self._engine.interventions.pinned))
        others = f"; {_blocks(left)} pinned by {self._pins.names}" if left else ""
        nothing = "nothing of that was pinned" + ("" if command.anyones else " by you")
        return (f"{_blocks(total)} unpinned" if total else nothing) + others

    def _tell(self) -> None:
        pinned = self._engine.interventions.pinned
        packed = struct.pack(f"<{len(pinned)}I", *pinned)
        self._desk.told = Told(packed, self._pins.names, *self._engine.interventions.limits)


def _blocks(count: int) -> str:
    return "1 block is" if count == 1 else f"{count} blocks are"
