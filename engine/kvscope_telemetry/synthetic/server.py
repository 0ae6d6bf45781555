"""The synthetic engine on real sockets: frames at a given rate, and an answer to every command.

Owns the thread that steps; commands are taken between two steps, as a real engine does. Texts are canned.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from typing import Final

import numpy as np
from msgspec import structs

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.keys.key_ring import KeyRing
from kvscope_telemetry.ledger import NO_OWNER
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    AllocatorMap,
    BlockContent,
    BlockText,
    Command,
    Control,
    Done,
    Evict,
    Failed,
    Finished,
    GetAllocatorMap,
    GetBlockText,
    GetSnapshot,
    GetStatus,
    Intervention,
    Pin,
    Preempt,
    Refused,
    Reply,
    RequestTiming,
    Status,
    Submit,
    Tokens,
    Unpin,
    Usage,
)
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import DeviceSample, Goodbye, Heartbeat, MemoryBreakdown
from kvscope_telemetry.sockets.server_sockets import ServerSockets
from kvscope_telemetry.state.allocator_map import AllocatorPool, State, TorchSegment, pack_map
from kvscope_telemetry.synthetic.engine import Output, SyntheticEngine

MIB = 1 << 20
WORDS: Final = (
    "the",
    "cache",
    "keeps",
    "what",
    "was",
    "read",
    "so",
    "each",
    "new",
    "word",
    "costs",
    "little",
)
SAMPLE_EVERY_NS: Final = 500_000_000
LOOK_EVERY_S: Final = 0.5
MAX_STEPS_AT_ONCE: Final = 64


class SyntheticServer:
    """Serves `engine` on `endpoint` with `rate` steps a second until `close`.

    `hold()` stops stepping between two steps, so that a test can compare; `release()` goes on. What a client
    holds goes on when its connection is gone.
    """

    def __init__(
        self,
        engine: SyntheticEngine,
        endpoint: str,
        *,
        rate: float = 100.0,
        keys: KeyRing | None = None,
        keyless: Role = Role.OPERATOR,
        heartbeats: bool = True,
    ) -> None:
        self.engine = engine
        self._rate = rate
        self._heartbeats = heartbeats
        self._commands: deque[tuple[bytes, Command]] = deque()
        self._clients: dict[int, tuple[bytes, Submit]] = {}
        self._is_held = False
        self._held_by = self._pinned_by = ""
        self._holder: bytes | None = None
        """The client that holds, and is looked after."""
        self._lost: deque[bytes] = deque()
        self._looked_s = 0.0
        self._closing = False
        self._between_steps = threading.Lock()
        self._wake = threading.Event()
        self._beat = engine.heartbeat()
        self._sampled_ns = 0
        self.sockets = ServerSockets(
            endpoint,
            on_command=self._enqueue,
            heartbeat=self._heartbeat,
            keys=keys,
            keyless=keyless,
            on_client_lost=self._lose,
        )
        self.sockets.publish(engine.hello)
        self._thread = threading.Thread(target=self._run, name="kvscope-synthetic", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Stop stepping; when this returns no step is in progress. Commands are still answered."""
        with self._between_steps:
            self._is_held = True

    def release(self) -> None:
        """Step again."""
        self._is_held, self._held_by, self._holder = False, "", None
        self._wake.set()

    def close(self, *, goodbye: bool = True) -> None:
        """End; without `goodbye` as if it had been killed."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join()
        if goodbye:
            self.sockets.publish(Goodbye(epoch=self.engine.hello.epoch))
        self.sockets.close()

    # The I/O thread.

    def _enqueue(self, client: bytes, command: Command) -> None:
        self._commands.append((client, command))
        self._wake.set()

    def _lose(self, client: bytes) -> None:
        self._lost.append(client)
        self._wake.set()

    def _heartbeat(self) -> Heartbeat | None:
        return self._stamped() if self._heartbeats else None

    def _stamped(self) -> Heartbeat:
        beat = self._beat
        return Heartbeat(
            epoch=beat.epoch,
            time_ns=time.monotonic_ns(),
            seq=beat.seq,
            step=beat.step,
            num_unfinished=0 if self._is_held else beat.num_unfinished,
            paused_by=self._held_by,
            pinned=np.array(sorted(self.engine.pinned), "<u4").tobytes(),
            pinned_by=self._pinned_by,
        )

    # The stepping thread.

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._closing:
            self._answer_all()
            self._look_after_holder()
            now_s = time.monotonic()
            if self._is_held or now_s < due_s:
                self._wake.wait(0.05 if self._is_held else min(0.05, due_s - now_s))
                self._wake.clear()
                due_s = max(due_s, now_s) if self._is_held else due_s
                continue
            num_steps = min(MAX_STEPS_AT_ONCE, 1 + int((now_s - due_s) * self._rate))
            for _ in range(num_steps):
                self._step()
            due_s = max(due_s + num_steps / self._rate, now_s - 0.1)

    def _step(self, *, even_held: bool = False) -> None:
        with self._between_steps:
            if self._is_held and not even_held:
                return
            self.sockets.publish(self.engine.advance())
            self._beat = self.engine.heartbeat()
        outputs, self.engine.outputs = self.engine.outputs, []
        for output in outputs:
            self._tell(output)
        self._sample()

    def _sample(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._sampled_ns < SAMPLE_EVERY_NS:
            return
        self._sampled_ns = now_ns
        epoch, cache = self.engine.hello.epoch, self.engine.hello.cache
        kv_bytes = cache.num_blocks * cache.block_bytes
        self.sockets.publish(MemoryBreakdown(epoch=epoch, time_ns=now_ns, weights_bytes=270 << 20, kv_bytes=kv_bytes))
        total_bytes = 2 * kv_bytes + (1 << 30)
        self.sockets.publish(
            DeviceSample(
                epoch=epoch,
                time_ns=now_ns,
                memory_total_bytes=total_bytes,
                memory_used_bytes=kv_bytes + (400 << 20),
                process_bytes=kv_bytes + (300 << 20),
                utilization=0.5,
            )
        )

    def _answer_all(self) -> None:
        while self._commands:
            client, command = self._commands.popleft()
            self._answer(client, command)

    def _look_after_holder(self) -> None:
        """A hold ends with its client. A connection that is gone is noticed when something is said."""
        while self._lost:
            if self._lost.popleft() == self._holder:
                self.release()
        if self._holder is not None and time.monotonic() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            self.sockets.reply(self._holder, self._status(self._holder, tag=0))

    def _status(self, client: bytes, tag: int) -> Status:
        endpoint, hello, by = self.sockets.telemetry_endpoint, self.engine.hello, self._held_by
        caller = self.sockets.caller(client)
        role, name = (caller.role, caller.name) if caller is not None else ("", "")
        status = Status(phase="ready", telemetry_endpoint=endpoint, hello=hello, tag=tag, role=role, name=name)
        return structs.replace(status, paused=bool(by), paused_by=by, intervenes=True)

    def _answer(self, client: bytes, command: Command) -> None:
        reply = self.sockets.reply
        if isinstance(command, GetSnapshot):
            reply(client, self.engine.snapshot(command.tag))
        elif isinstance(command, GetStatus):
            reply(client, self._status(client, command.tag))
        elif isinstance(command, GetBlockText):
            contents = tuple(self._block_content(block) for block in command.blocks)
            reply(client, BlockText(contents=contents, tag=command.tag))
        elif isinstance(command, GetAllocatorMap):
            reply(client, synthetic_allocator_map(command.tag))
        elif isinstance(command, Submit):
            self._submit(client, command)
        elif isinstance(command, Abort):
            self._abort(client, command)
        elif isinstance(command, Control):
            reply(client, self._control(client, command))
        elif isinstance(command, Intervention):
            reply(client, self._intervene(client, command))

    def _intervene(self, client: bytes, command: Intervention) -> Reply:
        """As far as is honest: there is no scheduler here whose limits could be changed."""
        engine, who = self.engine, self._name_of(client)
        try:
            if isinstance(command, Preempt):
                what = engine.preempt(command.number, command.how, who)
                self._step(even_held=True)  # only a step tells
            elif isinstance(command, Pin):
                what = f"{len(engine.pin(command.blocks))} blocks are pinned until they are unpinned"
            elif isinstance(command, Unpin):
                gone = engine.pinned & set(command.blocks or engine.pinned)
                engine.pinned.difference_update(gone)
                what = f"{len(gone)} blocks are unpinned"
            elif isinstance(command, Evict):
                what = engine.evict(command.blocks)
                self._step(even_held=True)
            else:
                return Failed(reason="the synthetic engine has no limits to change and no adapters", tag=command.tag)
        except BadInput as error:
            return Failed(reason=str(error), tag=command.tag)
        self._pinned_by = who if engine.pinned else ""
        return Done(tag=command.tag, what=what)

    def _submit(self, client: bytes, command: Submit) -> None:
        if self._number_of(client, command.request_id) is not None:
            reason = f"request_id {command.request_id!r} is in use"
            self.sockets.reply(client, Refused(request_id=command.request_id, reason=reason))
            return
        texts = [m.content for m in command.messages or ()] + [command.prompt or ""]
        num_prompt = max(1, sum(map(len, texts)) // 4, len(command.prompt_token_ids or ()))
        number = self.engine.submit(command.request_id, num_prompt, command.sampling.max_tokens or 256)
        self._clients[number] = (client, command)
        accepted = Accepted(request_id=command.request_id, numbers=(number,), num_prompt_tokens=num_prompt)
        self.sockets.reply(client, accepted)
        self._step(even_held=True)  # what no frame told of must not be in a snapshot

    def _abort(self, client: bytes, command: Abort) -> None:
        number = self._number_of(client, command.request_id)
        if number is not None:
            self.engine.abort(number)
            self._step(even_held=True)
        self.sockets.reply(client, Done(request_id=command.request_id))

    def _control(self, client: bytes, command: Control) -> Reply:
        what = ""
        if command.action == "pause":
            self.hold()
            self._held_by, self._holder = self._name_of(client), client
        elif command.action == "resume":
            self.release()
        elif command.action == "shutdown":
            self._closing = True
        elif command.action == "step":
            if not self._is_held:
                return Failed(reason="the engine is not paused", tag=command.tag)
            for _ in range(command.num_steps):
                self._step(even_held=True)
            what = f"{command.num_steps} steps ran, up to step {self.engine.step}"
        return Done(tag=command.tag, what=what)

    def _name_of(self, client: bytes) -> str:
        caller = self.sockets.caller(client)
        return caller.name if caller is not None else "somebody"

    def _number_of(self, client: bytes, request_id: str) -> int | None:
        for number, (owner, submit) in self._clients.items():
            if owner == client and submit.request_id == request_id:
                return number
        return None

    def _tell(self, output: Output) -> None:
        if output.number not in self._clients:
            return
        client, submit = self._clients[output.number]
        if not output.reason:
            word = WORDS[(output.num_output - 1) % len(WORDS)] + " "
            token = Tokens(request_id=submit.request_id, token_ids=(output.num_output,), text=word)
            self.sockets.reply(client, token)
            return
        del self._clients[output.number]
        finished = Finished(
            request_id=submit.request_id,
            finish_reason="length" if output.reason == "length" else "abort",
            usage=Usage(completion_tokens=output.num_output),
            timing=RequestTiming(),
        )
        self.sockets.reply(client, finished)

    def _block_content(self, block: int) -> BlockContent:
        ledger = self.engine.ledger
        if block >= ledger.num_blocks or int(ledger.owner[block]) == NO_OWNER:
            return BlockContent(block=block)
        ids = tuple(range(int(ledger.filled[block])))
        text = " ".join(WORDS[(block + i) % len(WORDS)] for i in ids)
        return BlockContent(block=block, number=int(ledger.owner[block]), token_ids=ids, text=text)


def synthetic_allocator_map(tag: int) -> AllocatorMap:
    """A made-up map of torch's allocator, as an engine with a model of some GiB has it after a while.

    Weights, a KV pool, activations with holes, small tensors and a captured graph; always the same.
    """
    draw = random.Random(9)
    segments = [_segment(draw, 0, 4096 * MIB, AllocatorPool.LARGE, 4096 * MIB, holes=0.0)]
    segments += [_segment(draw, 1 + n, 640 * MIB, AllocatorPool.LARGE, 48 * MIB, holes=0.05) for n in range(4)]
    segments += [
        _segment(draw, 10 + n, (20 + 40 * n) * MIB, AllocatorPool.LARGE, 12 * MIB, holes=0.5) for n in range(8)
    ]
    segments += [_segment(draw, 20 + n, 2 * MIB, AllocatorPool.SMALL, MIB // 8, holes=0.4) for n in range(12)]
    segments.append(_segment(draw, 40, 256 * MIB, AllocatorPool.PRIVATE, 32 * MIB, holes=0.2))
    return pack_map(segments, tag=tag, device="synthetic")


def _segment(
    draw: random.Random, place: int, num_bytes: int, pool: AllocatorPool, most_bytes: int, *, holes: float
) -> TorchSegment:
    sizes: list[int] = []
    while (left := num_bytes - sum(sizes)) > 0:
        sizes.append(min(left, most_bytes if not holes else draw.randrange(1, most_bytes // 512 + 1) * 512))
    states = [_state(draw.random(), holes) for _ in sizes]
    offsets = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    address = 0x7F00_0000_0000 + (place << 33)
    return TorchSegment(address, num_bytes, 0, pool, offsets, np.array(sizes, np.int64), np.array(states, np.uint8))


def _state(drawn: float, holes: float) -> State:
    if drawn < holes:
        return State.CACHED
    return State.PENDING if drawn < holes * 1.1 else State.ALLOCATED
