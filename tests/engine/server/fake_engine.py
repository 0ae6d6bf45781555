"""A small engine that implements `ServedEngine`, and a process that serves it.

As a script: `fake_engine.py ENDPOINT [option=value]…`, with the fields of `FakeEngineOptions`.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvscope_engine.server.served_engine import BuildEngine, MessagesDropped, OnProgress, Publish
from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.errors import BadInput, KvscopeError, PromptTooLong
from kvscope_telemetry.ledger import Ledger
from kvscope_telemetry.messages.commands import (
    Accepted,
    AllocatorMap,
    BlockContent,
    Finished,
    FinishReason,
    LoadedAdapter,
    PromptEstimate,
    RequestTiming,
    Submit,
    Tokens,
    Usage,
)
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    DeviceInfo,
    Frame,
    Hello,
    MemoryBreakdown,
    ModelInfo,
    Progress,
    Snapshot,
)

EPOCH = 7
NUM_BLOCKS = 8


@dataclass(frozen=True)
class FakeEngineOptions:
    """Behaviour of the fake engine."""

    step_s: float = 0.0
    prompt_s: float = 0.0
    """Seconds to tokenize a prompt that starts with "slow"."""
    block_s: float = 0.0
    """Seconds to get the text of a block."""
    pack_s: float = 0.0
    """Seconds to make a snapshot."""
    fail_at_step: int = 0
    """Number of the step whose forward pass raises; 0 for none."""
    load_s: float = 0.0
    may_load: Callable[[], bool] = bool
    """Event that ends the loading early."""
    load_error: str = ""
    """Error while loading: "bad input", "no memory" or "bug"."""
    hang: str = ""
    """Where it computes endlessly: "load" or "step", or while holding the interpreter lock "load C" or "step C". With
    "build" it waits for a program that waits for another."""
    stop_s: float = 10.0
    exit_with_parent: int = 0
    record: str = ""
    """Path of a recording to write."""
    max_model_len: int = 0
    max_request_tokens: int = 0
    """Number of tokens that the whole block pool holds."""


@dataclass
class FakeCompletion:
    """The remaining tokens of a completion."""

    request_id: str
    index: int
    num_left: int
    num_prompt_tokens: int
    num_said: int = 0
    reason: FinishReason = "length"


@dataclass
class FakeInterventions:
    """Accepts interventions for even blocks and requests, and records them."""

    pinned: list[int] = field(default_factory=list)
    limits: tuple[int, int] = (16, 64)
    adapters: tuple[LoadedAdapter, ...] = ()
    can_update_adapters: bool = True

    def preempt(self, number: int, how: str, by: str) -> str:
        if number % 2:
            raise BadInput(f"request {number} is odd")
        return f"request {number} was preempted by {how or 'itself'}"

    def pin(self, blocks: Sequence[int], by: str, *, with_prefix: bool) -> list[int]:
        self.pinned = sorted({*self.pinned, *blocks})
        return list(blocks)

    def unpin(self, blocks: Sequence[int], by: str) -> None:
        self.pinned = [block for block in self.pinned if block not in blocks]

    def evict(self, blocks: Sequence[int], by: str) -> str:
        return f"{len(blocks)} evicted"

    def set_limits(self, max_num_seqs: int, max_num_batched_tokens: int, by: str) -> str:
        self.limits = max_num_seqs or self.limits[0], max_num_batched_tokens or self.limits[1]
        return f"limits {self.limits}"

    def load_adapter(self, name: str, path: str, by: str) -> str:
        self.adapters += (LoadedAdapter(name=name, path=path),)
        return f"{name} was loaded by {by}"

    def unload_adapter(self, name: str, by: str) -> str:
        if name not in [adapter.name for adapter in self.adapters]:
            raise BadInput(f"{name} is not loaded")
        self.adapters = tuple(adapter for adapter in self.adapters if adapter.name != name)
        return f"{name} was unloaded by {by}"


@dataclass
class FakeStops:
    """Records its calls."""

    calls: list[str] = field(default_factory=list)

    def pause(self, by: str) -> None:
        self.calls.append(f"paused by {by}")

    def resume(self, why: str) -> None:
        if self.calls and not self.calls[-1].startswith("resumed"):
            self.calls.append(f"resumed: {why}")

    @contextmanager
    def single_step(self, by: str) -> Iterator[None]:
        yield
        self.calls.append(f"step for {by}")

    def beat(self) -> bool:
        return False

    def report_suspensions(self) -> None:
        return None


@dataclass
class FakeEngine:
    """Generates one token per step and completion: the step's number."""

    options: FakeEngineOptions
    publish: Publish
    step_count: int = 0
    step_started_ns: int = 0
    last_seq: int = 0
    num_snapshots: int = 0
    may_step: threading.Event = field(default_factory=threading.Event)
    """Event that a test clears to make a step last until it is set."""
    closed: bool = False
    failure: str = ""
    num_idle: int = 0
    """How often the engine was idle."""
    is_ahead: bool = False
    """Whether a step is in flight."""
    running: list[FakeCompletion] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    """Ids of requests aborted before their prompts were tokenized."""
    interventions: FakeInterventions = field(default_factory=FakeInterventions)
    pauses: FakeStops = field(default_factory=FakeStops)

    def __post_init__(self) -> None:
        self.may_step.set()
        self.hello = Hello(
            epoch=EPOCH,
            time_ns=time.monotonic_ns(),
            wall_time_ns=time.time_ns(),
            model=ModelInfo(name="fake", max_model_len=self.options.max_model_len),
            cache=CacheInfo(num_blocks=NUM_BLOCKS, block_size=16, max_request_tokens=self.options.max_request_tokens),
            device=DeviceInfo(kind="cpu"),
        )
        self.publish(self.hello)

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def has_grammar(self, submit: Submit) -> bool:
        return True

    def num_text_tokens(self, text: str) -> int:
        return len(text)

    def estimate_prompt(self, submit: Submit, token_ids: list[int], num_draft_tokens: int, tag: int) -> PromptEstimate:
        if submit.adapter:
            raise BadInput(f"LoRA adapter {submit.adapter!r} is not loaded")
        return PromptEstimate(num_prompt_tokens=len(token_ids), num_draft_tokens=num_draft_tokens, tag=tag)

    def prompt_token_ids(self, submit: Submit, is_wanted: Callable[[], bool] = lambda: True) -> list[int]:
        if submit.messages:
            return [0] * sum(len(message.content) for message in submit.messages)
        if not submit.prompt:
            raise BadInput("the prompt is empty: at least one token is accepted")
        if submit.prompt.startswith("slow"):
            time.sleep(self.options.prompt_s)
        return [0] * len(submit.prompt)

    def submit(self, submit: Submit, token_ids: Callable[[], list[int]] | None = None) -> Accepted:
        assert token_ids is not None, "prompts are made into tokens beside the engine's thread"
        token_ids()
        if not submit.prompt:
            raise BadInput("this engine runs only prompts of text, and estimates those of messages")
        if submit.prompt.startswith("long"):
            raise PromptTooLong("the prompt is too long")
        if submit.prompt == "bug":
            raise RuntimeError("a bug in submit")
        sampling = submit.sampling
        for index in range(sampling.n):
            tokens = sampling.max_tokens or 1_000_000
            self.running.append(FakeCompletion(submit.request_id, index, tokens, len(submit.prompt)))
        return Accepted(
            request_id=submit.request_id,
            numbers=tuple(range(1, sampling.n + 1)),
            num_prompt_tokens=len(submit.prompt),
        )

    def abort(self, request_id: str, index: int | None = None) -> None:
        for completion in self.running:
            if completion.request_id == request_id and index in (None, completion.index):
                completion.num_left, completion.reason = 0, "abort"

    def record_aborted(self, submit: Submit) -> None:
        self.listed.append(submit.request_id)

    def while_idle(self) -> bool:
        assert not self.has_unfinished, "somebody waits"
        self.num_idle += 1
        return False

    def finish_in_flight(self) -> list[Tokens | Finished]:
        self.is_ahead = False
        return []

    def step(self, *, ahead: bool = True) -> list[Tokens | Finished]:
        self.is_ahead = ahead
        self.step_started_ns = time.monotonic_ns()
        outputs: list[Tokens | Finished] = []
        if any(completion.num_left for completion in self.running):
            self.step_count += 1
            time.sleep(self.options.step_s)
            self.may_step.wait(60)
            hang(self.options.hang, "step")
            if self.step_count == self.options.fail_at_step:
                raise RuntimeError("evil forward")
        for completion in self.running:
            outputs += self._say(completion)
        self.running = [completion for completion in self.running if completion.num_left]
        self.step_started_ns = 0
        self._frame()
        return outputs

    def snapshot(self, tag: int) -> Snapshot:
        self.num_snapshots += 1
        time.sleep(self.options.pack_s)
        rows = Ledger(NUM_BLOCKS).pack_all()
        return Snapshot(hello=self.hello, seq=self.last_seq, step=self.step_count, time_ns=0, blocks=rows, tag=tag)

    def drain_ended(self) -> list[RecordedText]:
        return []

    def block_text(self, blocks: Sequence[int]) -> tuple[BlockContent, ...]:
        time.sleep(self.options.block_s * len(blocks))
        return tuple(BlockContent(block=block) for block in blocks)

    def allocator_map(self, tag: int) -> AllocatorMap:
        raise BadInput("the engine runs on 'cpu': it has no segments")

    def reset_prefix_cache(self) -> None:
        self._frame()

    def memory(self) -> MemoryBreakdown:
        return MemoryBreakdown(epoch=EPOCH, time_ns=time.monotonic_ns(), weights_bytes=1, kv_bytes=2)

    def close(self) -> None:
        self.closed = True

    def _say(self, completion: FakeCompletion) -> list[Tokens | Finished]:
        outputs: list[Tokens | Finished] = []
        if completion.num_left:
            completion.num_left -= 1
            completion.num_said += 1
            ids = (self.step_count,)
            outputs.append(
                Tokens(request_id=completion.request_id, index=completion.index, token_ids=ids, text=f"{ids[0]} ")
            )
        if not completion.num_left:
            outputs.append(self._ended(completion))
        return outputs

    def _ended(self, completion: FakeCompletion) -> Finished:
        return Finished(
            request_id=completion.request_id,
            index=completion.index,
            finish_reason=completion.reason,
            usage=Usage(prompt_tokens=completion.num_prompt_tokens, completion_tokens=completion.num_said),
            timing=RequestTiming(),
        )

    def _frame(self) -> None:
        self.last_seq += 1
        self.publish(Frame(epoch=EPOCH, seq=self.last_seq, step=self.step_count, time_ns=time.monotonic_ns()))


def hang(where: str, here: str) -> None:
    """Hang in C while holding the interpreter lock, or in Python."""
    if where == f"{here} C":
        sum(itertools.repeat(1))
    elif where == here:
        ctypes.CDLL(None).pause()
        ctypes.CDLL(None).pause()
    elif where == "build":
        subprocess.run(["sh", "-c", "sleep 986.25 & wait"])


def builder(options: FakeEngineOptions) -> BuildEngine:
    """Return a function that loads a FakeEngine like a model: slowly, with progress, and possibly failing."""

    def build(progress: OnProgress, publish: Publish, messages_dropped: MessagesDropped) -> FakeEngine:
        deadline = time.monotonic() + options.load_s
        fetched = Progress(stage="load", detail="fake", done=1, total=4, unit="tensors")
        progress(fetched)
        hang(options.hang, "load")
        while time.monotonic() < deadline and not options.may_load():
            progress(fetched)  # repeated, so that a subscriber notices that it is connected
            time.sleep(0.005)
        if options.load_error == "bad input":
            raise BadInput("model 'fake' is not accepted: it is not real")
        if options.load_error == "no memory":
            raise KvscopeError("there is no memory left:\n1 byte of 2 is free")
        if options.load_error == "bug":
            raise ZeroDivisionError("division by zero")
        return FakeEngine(options, publish)

    return build


def main() -> int:
    """Run like `kvscope-engine serve` with the fake engine."""
    from kvscope_engine.cli import main as command
    from kvscope_engine.cli import serve
    from kvscope_engine.server.parent_watch import watch_parent

    words = dict(word.split("=", 1) for word in sys.argv[2:])
    kinds = {name: type(value) for name, value in vars(FakeEngineOptions()).items()}
    options = FakeEngineOptions(**{name: kinds[name](value) for name, value in words.items()})
    if options.exit_with_parent:
        watch_parent(options.exit_with_parent)
    record = Path(options.record) if options.record else None
    serve.run = lambda args: serve.serve(args.endpoint, builder(options), record=record, stop_s=options.stop_s)
    return command.main(["serve", "--endpoint", sys.argv[1]])


if __name__ == "__main__":
    sys.exit(main())
