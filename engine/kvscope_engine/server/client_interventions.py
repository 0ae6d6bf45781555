"""What clients do to a running engine: pauses, single steps, pins, evictions, preemptions and limits.

Owns who paused the engine, the steps that are asked for one by one, whose a pin is and what everybody is told of it.
Knows no sockets. Belongs to the engine's thread, where nothing else is said.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvscope_engine.server.served_engine import ServedEngine
from kvscope_telemetry.messages.commands import (
    Control,
    Done,
    Evict,
    Intervention,
    LoadAdapter,
    LoadedAdapter,
    Pin,
    Preempt,
    Reply,
    SetLimits,
    UnloadAdapter,
    Unpin,
    refuse,
)


@dataclass(frozen=True, slots=True)
class HeartbeatFacts:
    """What everybody is told with each heartbeat, as in `Heartbeat`, or when he asks."""

    pinned: bytes = b""
    pinned_by: str = ""
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    adapters: tuple[LoadedAdapter, ...] = ()
    """As in `Status`, the next too."""
    takes_adapters: bool = False


class ClientInterventions:
    """One for an engine. `tell` is given what a heartbeat says, `reply` what is answered later; `name_of` says what a
    client is called."""

    def __init__(
        self,
        engine: ServedEngine,
        pauses: Pauses,
        tell: Callable[[HeartbeatFacts], None],
        reply: Callable[[bytes, Reply], None],
        name_of: Callable[[bytes], str],
    ) -> None:
        self.steps = SingleSteps(reply)
        self._engine = engine
        self._pauses = pauses
        self._tell_all = tell
        self._name_of = name_of
        self._pins = PinBook()
        self._tell()

    @property
    def clients(self) -> list[bytes]:
        """Those whose going away changes something."""
        return self._pins.clients

    def do(self, client: bytes, command: Intervention) -> Reply:
        """Do it and say what was done. Raises BadInput with the reason where it cannot be."""
        what = self._do(client, command)
        self._tell()
        return Done(tag=command.tag, what=what)

    def step(self, client: bytes, command: Control) -> Reply | None:
        """Run steps though the engine is paused; None: it is answered when they ran."""
        if not self._pauses.any:
            return refuse(command, "the engine is not paused")
        if not self._engine.num_unfinished:
            return refuse(command, "no unfinished request: there is no step to run")
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
            self.steps.end(self._engine.step_count, "no unfinished request left")

    def look_at_pauses(self) -> None:
        """Who paused the engine may have let it go on."""
        if not self._pauses.any and self.steps.any:
            self.steps.end(self._engine.step_count, "engine resumed")

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
        self.look_at_pauses()

    def _do(self, client: bytes, command: Intervention) -> str:
        does, by = self._engine.interventions, self._name_of(client)
        if isinstance(command, Preempt):
            return does.preempt(command.number, command.how, by)
        if isinstance(command, Pin):
            blocks = does.pin(command.blocks, by, with_prefix=command.with_prefix)
            self._pins.add(client, by, blocks)
            left = "" if command.with_prefix or len(blocks) == len(set(command.blocks)) else "; others hold no prefix"
            return f"{_blocks(len(blocks))} pinned until you disconnect{left}"
        if isinstance(command, Unpin):
            return self._unpin(client, command)
        if isinstance(command, Evict):
            return does.evict(command.blocks, by)
        if isinstance(command, LoadAdapter):
            return does.load_adapter(command.name, command.path, by)
        if isinstance(command, UnloadAdapter):
            return does.unload_adapter(command.name, by)
        assert isinstance(command, SetLimits), f"{command} is no intervention"
        return does.set_limits(command.max_num_seqs, command.max_num_batched_tokens, by)

    def _unpin(self, client: bytes, command: Unpin) -> str:
        total = 0
        for whose in self._pins.clients if command.anyones else [client]:
            name = self._pins.name(whose)
            count, blocks = self._pins.take(whose, command.blocks)
            self._engine.interventions.unpin(blocks, name)
            total += count
        left = len(set(command.blocks) & set(self._engine.interventions.pinned))
        others = f"; {_blocks(left)} pinned by {self._pins.names}" if left else ""
        nothing = "none of these was pinned" + ("" if command.anyones else " by you")
        return (f"{_blocks(total)} unpinned" if total else nothing) + others

    def _tell(self) -> None:
        does = self._engine.interventions
        packed = struct.pack(f"<{len(does.pinned)}I", *does.pinned)
        self._tell_all(HeartbeatFacts(packed, self._pins.names, *does.limits, does.adapters, does.takes_adapters))


def _blocks(count: int) -> str:
    return "1 block is" if count == 1 else f"{count} blocks are"


class PinBook:
    """Blocks by the clients that pinned them: one stays pinned while any of them is there and wants it."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, set[int]] = {}
        self._names: dict[bytes, str] = {}

    @property
    def names(self) -> str:
        """Of all that pin something, for people; empty when nobody does."""
        return ", ".join(dict.fromkeys(self._names.values()))

    @property
    def clients(self) -> list[bytes]:
        """Those that do."""
        return list(self._blocks)

    def name(self, client: bytes) -> str:
        """What a client that pins something is called."""
        return self._names.get(client, "somebody")

    def add(self, client: bytes, name: str, blocks: Iterable[int]) -> None:
        """The client pinned `blocks`."""
        self._blocks.setdefault(client, set()).update(blocks)
        self._names[client] = name

    def take(self, client: bytes, blocks: Iterable[int] = ()) -> tuple[int, list[int]]:
        """The client's pins on `blocks`, all it has where none are given, end: how many, and those nobody else has."""
        held = self._blocks.get(client, set())
        ended = held & set(blocks) if blocks else set(held)
        held -= ended
        if not held:
            self._blocks.pop(client, None)
            self._names.pop(client, None)
        others = set().union(*self._blocks.values()) if self._blocks else set()
        return len(ended), sorted(ended - others)

    def clear(self) -> None:
        """No block is pinned any more."""
        self._blocks.clear()
        self._names.clear()


@dataclass(slots=True)
class _Asked:
    client: bytes
    tag: int
    num_wanted: int
    num_run: int = 0


class SingleSteps:
    """Steps that are asked for one by one while the engine is paused: who waits for how many more.

    Told when a step ran. Answers through `reply` when the steps that were asked for ran, or none can follow.
    """

    def __init__(self, reply: Callable[[bytes, Reply], None]) -> None:
        self._reply = reply
        self._asked: deque[_Asked] = deque()

    @property
    def any(self) -> bool:
        """Whether a step is to be run though the engine is paused."""
        return bool(self._asked)

    @property
    def first(self) -> bytes | None:
        """The client whose turn it is."""
        return self._asked[0].client if self._asked else None

    def ask(self, client: bytes, tag: int, num_steps: int) -> None:
        """Run so many, after those that were asked for before."""
        self._asked.append(_Asked(client, tag, num_steps))

    def ran(self, step: int) -> None:
        """Step `step` ran; does nothing when nobody asked for it."""
        if self._asked:
            first = self._asked[0]
            first.num_run += 1
            if first.num_run == first.num_wanted:
                self._asked.popleft()
                self._answer(first, step)

    def end(self, step: int, why: str) -> None:
        """There will be no more of them; `step` was the last."""
        while self._asked:
            self._answer(self._asked.popleft(), step, why)

    def forget(self, client: bytes) -> None:
        """Nobody waits for what it asked for."""
        self._asked = deque(asked for asked in self._asked if asked.client != client)

    def _answer(self, asked: _Asked, step: int, why: str = "") -> None:
        if asked.num_run > 1:
            what = f"steps {step - asked.num_run + 1} to {step} ran"
        else:
            what = f"step {step} ran" if asked.num_run else "no step ran"
        self._reply(asked.client, Done(tag=asked.tag, what=f"{what}: {why}" if why else what))


@dataclass(slots=True)
class _Pause:
    name: str
    lease_ns: int
    """0: as long as the connection."""
    heard_ns: int


class Pauses:
    """Who paused the engine, which stands still while anybody did. A pause lasts as long as whoever asked for it.

    `renew` is called on the I/O thread; `names` and `paused_s` may be read from any.
    """

    def __init__(self) -> None:
        self.names = ""
        """Of all who paused it, for people; empty when nobody did."""
        self._pauses: dict[bytes, _Pause] = {}
        self._since_ns = 0
        """When the first of those that last began."""

    @property
    def any(self) -> bool:
        """Whether the engine is paused."""
        return bool(self._pauses)

    @property
    def paused_s(self) -> float:
        """How long the engine has stood still."""
        since_ns = self._since_ns
        return (time.monotonic_ns() - since_ns) / 1e9 if since_ns else 0.0

    @property
    def clients(self) -> list[bytes]:
        """Those that paused it."""
        return list(self._pauses)

    def pause(self, client: bytes, name: str, lease_s: float) -> None:
        """From now on, for this client."""
        self._pauses[client] = _Pause(name, int(lease_s * 1e9), time.monotonic_ns())
        self._tell()

    def renew(self, client: bytes) -> None:
        """Something was heard of a client."""
        pause = self._pauses.get(client)
        if pause is not None:
            pause.heard_ns = time.monotonic_ns()

    def end(self, client: bytes) -> None:
        """A client is gone; does nothing for one that paused nothing."""
        self._pauses.pop(client, None)
        self._tell()

    def end_all(self) -> None:
        """Somebody lets the engine go on."""
        self._pauses.clear()
        self._tell()

    def expire(self) -> None:
        """End the pauses of those that were not heard of for their lease."""
        now_ns = time.monotonic_ns()
        for client, pause in list(self._pauses.items()):
            if pause.lease_ns and now_ns - pause.heard_ns > pause.lease_ns:
                del self._pauses[client]
        self._tell()

    def _tell(self) -> None:
        self._since_ns = (self._since_ns or time.monotonic_ns()) if self._pauses else 0
        self.names = ", ".join(dict.fromkeys(pause.name for pause in self._pauses.values()))
