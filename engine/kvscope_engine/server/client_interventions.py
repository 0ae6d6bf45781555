"""Clients' interventions in a running engine: pauses, single steps, pins, evictions, preemptions and limits.

`ClientInterventions` owns the queued single steps, the pins of each client, and the data on pins, limits and adapters
that heartbeats publish. `PausingClients` is owned by `CommandReceiver`, because pauses are renewed on its thread.
Imports no sockets. Not thread-safe: used on the engine's thread, except where stated.
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
    """Pins, limits and adapters, as `Heartbeat` and `Status` publish them."""

    pinned: bytes = b""
    pinned_by: str = ""
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    adapters: tuple[LoadedAdapter, ...] = ()
    """Loaded LoRA adapters. They are published in `Status`, but not in heartbeats."""
    takes_adapters: bool = False


class ClientInterventions:
    """Carries out the interventions of clients in one engine.

    `publish_facts` receives the data for heartbeats, `reply` sends delayed replies, and `name_of` returns a client's
    display name.
    """

    def __init__(
        self,
        engine: ServedEngine,
        pauses: PausingClients,
        publish_facts: Callable[[HeartbeatFacts], None],
        reply: Callable[[bytes, Reply], None],
        name_of: Callable[[bytes], str],
    ) -> None:
        self.steps = SingleSteps(reply)
        self._engine = engine
        self._pauses = pauses
        self._publish_facts = publish_facts
        self._name_of = name_of
        self._pins = ClientPins()
        self._publish()

    @property
    def clients(self) -> list[bytes]:
        """Clients that have pinned blocks."""
        return self._pins.clients

    def execute(self, client: bytes, command: Intervention) -> Reply:
        outcome = self._carry_out(client, command)
        self._publish()
        return Done(tag=command.tag, what=outcome)

    def step(self, client: bytes, command: Control) -> Reply | None:
        """Queue single steps of a paused engine. Returns None if the reply is sent after the steps."""
        if not self._pauses.is_paused:
            return refuse(command, "the engine is not paused")
        if not self._engine.num_unfinished:
            return refuse(command, "no unfinished request: there is no step to run")
        self.steps.request(client, command.tag, command.num_steps)
        return None

    @property
    def requested_by(self) -> str:
        return "" if self.steps.first is None else self._name_of(self.steps.first)

    def step_completed(self) -> None:
        if not self.steps.has_pending:
            return
        self.steps.record_step(self._engine.step_count)
        if not self._engine.num_unfinished:
            self.steps.cancel_all(self._engine.step_count, "no unfinished request left")

    def end_steps_if_resumed(self) -> None:
        if not self._pauses.is_paused and self.steps.has_pending:
            self.steps.cancel_all(self._engine.step_count, "engine resumed")

    def reset(self) -> None:
        """Drop all pins, after the prefix cache was emptied."""
        self._pins.clear()
        self._publish()

    def disconnect(self, client: bytes) -> None:
        self.steps.remove_client(client)
        name = self._pins.name(client)
        _, blocks = self._pins.remove(client)
        self._engine.interventions.unpin(blocks, name)
        self._publish()
        self.end_steps_if_resumed()

    def _carry_out(self, client: bytes, command: Intervention) -> str:
        interventions, by = self._engine.interventions, self._name_of(client)
        if isinstance(command, Preempt):
            return interventions.preempt(command.number, command.how, by)
        if isinstance(command, Pin):
            blocks = interventions.pin(command.blocks, by, with_prefix=command.with_prefix)
            self._pins.add(client, by, blocks)
            suffix = "" if command.with_prefix or len(blocks) == len(set(command.blocks)) else "; others hold no prefix"
            return f"{_blocks(len(blocks))} pinned until you disconnect{suffix}"
        if isinstance(command, Unpin):
            return self._unpin(client, command)
        if isinstance(command, Evict):
            return interventions.evict(command.blocks, by)
        if isinstance(command, LoadAdapter):
            return interventions.load_adapter(command.name, command.path, by)
        if isinstance(command, UnloadAdapter):
            return interventions.unload_adapter(command.name, by)
        assert isinstance(command, SetLimits), f"{command} is no intervention"
        return interventions.set_limits(command.max_num_seqs, command.max_num_batched_tokens, by)

    def _unpin(self, client: bytes, command: Unpin) -> str:
        num_unpinned = 0
        for owner in self._pins.clients if command.anyones else [client]:
            name = self._pins.name(owner)
            count, blocks = self._pins.remove(owner, command.blocks)
            self._engine.interventions.unpin(blocks, name)
            num_unpinned += count
        num_left = len(set(command.blocks) & set(self._engine.interventions.pinned))
        others = f"; {_blocks(num_left)} pinned by {self._pins.names}" if num_left else ""
        nothing = "none of these was pinned" + ("" if command.anyones else " by you")
        return (f"{_blocks(num_unpinned)} unpinned" if num_unpinned else nothing) + others

    def _publish(self) -> None:
        interventions = self._engine.interventions
        packed = struct.pack(f"<{len(interventions.pinned)}I", *interventions.pinned)
        self._publish_facts(
            HeartbeatFacts(
                packed,
                self._pins.names,
                *interventions.limits,
                interventions.adapters,
                interventions.can_update_adapters,
            )
        )


def _blocks(count: int) -> str:
    return "1 block is" if count == 1 else f"{count} blocks are"


class ClientPins:
    """Pinned blocks by client. A block stays pinned while at least one client pins it."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, set[int]] = {}
        self._names: dict[bytes, str] = {}

    @property
    def names(self) -> str:
        return ", ".join(dict.fromkeys(self._names.values()))

    @property
    def clients(self) -> list[bytes]:
        return list(self._blocks)

    def name(self, client: bytes) -> str:
        return self._names.get(client, "a client")

    def add(self, client: bytes, name: str, blocks: Iterable[int]) -> None:
        self._blocks.setdefault(client, set()).update(blocks)
        self._names[client] = name

    def remove(self, client: bytes, blocks: Iterable[int] = ()) -> tuple[int, list[int]]:
        """Remove the client's pins on `blocks`, or all its pins if `blocks` is empty.

        Returns the number of pins removed, and the blocks that no client pins any longer.
        """
        pinned = self._blocks.get(client, set())
        removed = pinned & set(blocks) if blocks else set(pinned)
        pinned -= removed
        if not pinned:
            self._blocks.pop(client, None)
            self._names.pop(client, None)
        others = set().union(*self._blocks.values()) if self._blocks else set()
        return len(removed), sorted(removed - others)

    def clear(self) -> None:
        self._blocks.clear()
        self._names.clear()


@dataclass(slots=True)
class _StepRequest:
    client: bytes
    tag: int
    num_wanted: int
    num_run: int = 0


class SingleSteps:
    """Queue of the single steps that clients requested while the engine is paused.

    `reply` answers a client once its steps have run or were cancelled.
    """

    def __init__(self, reply: Callable[[bytes, Reply], None]) -> None:
        self._reply = reply
        self._requests: deque[_StepRequest] = deque()

    @property
    def has_pending(self) -> bool:
        return bool(self._requests)

    @property
    def first(self) -> bytes | None:
        return self._requests[0].client if self._requests else None

    def request(self, client: bytes, tag: int, num_steps: int) -> None:
        self._requests.append(_StepRequest(client, tag, num_steps))

    def record_step(self, step: int) -> None:
        if self._requests:
            first = self._requests[0]
            first.num_run += 1
            if first.num_run == first.num_wanted:
                self._requests.popleft()
                self._answer(first, step)

    def cancel_all(self, step: int, why: str) -> None:
        """Cancel all queued single steps, and reply to their clients with the reason `why`. `step` is the
        number of the last step that ran.
        """
        while self._requests:
            self._answer(self._requests.popleft(), step, why)

    def remove_client(self, client: bytes) -> None:
        self._requests = deque(request for request in self._requests if request.client != client)

    def _answer(self, request: _StepRequest, step: int, why: str = "") -> None:
        if request.num_run > 1:
            outcome = f"steps {step - request.num_run + 1} to {step} ran"
        else:
            outcome = f"step {step} ran" if request.num_run else "no step ran"
        self._reply(request.client, Done(tag=request.tag, what=f"{outcome}: {why}" if why else outcome))


@dataclass(slots=True)
class _Pause:
    name: str
    lease_ns: int
    """Nanoseconds without a message of the client after which its pause ends; 0 if it ends only with the connection."""
    last_message_ns: int


class PausingClients:
    """Clients that paused the engine. The engine is paused while there is at least one.

    `renew` is called on the I/O thread; `names` and `paused_s` can be read on any thread.
    """

    def __init__(self) -> None:
        self.names = ""
        self._pauses: dict[bytes, _Pause] = {}
        self._since_ns = 0
        """Monotonic time at which the current pause began; 0 if the engine is not paused."""

    @property
    def is_paused(self) -> bool:
        return bool(self._pauses)

    @property
    def paused_s(self) -> float:
        """Seconds since the engine was paused; 0.0 if it is not paused."""
        since_ns = self._since_ns
        return (time.monotonic_ns() - since_ns) / 1e9 if since_ns else 0.0

    @property
    def clients(self) -> list[bytes]:
        return list(self._pauses)

    def pause(self, client: bytes, name: str, lease_s: float) -> None:
        self._pauses[client] = _Pause(name, int(lease_s * 1e9), time.monotonic_ns())
        self._update_names()

    def renew(self, client: bytes) -> None:
        pause = self._pauses.get(client)
        if pause is not None:
            pause.last_message_ns = time.monotonic_ns()

    def end(self, client: bytes) -> None:
        self._pauses.pop(client, None)
        self._update_names()

    def end_all(self) -> None:
        self._pauses.clear()
        self._update_names()

    def expire(self) -> None:
        """End the pauses of clients that were silent for longer than their lease."""
        now_ns = time.monotonic_ns()
        for client, pause in list(self._pauses.items()):
            if pause.lease_ns and now_ns - pause.last_message_ns > pause.lease_ns:
                del self._pauses[client]
        self._update_names()

    def _update_names(self) -> None:
        self._since_ns = (self._since_ns or time.monotonic_ns()) if self._pauses else 0
        self.names = ", ".join(dict.fromkeys(pause.name for pause in self._pauses.values()))
