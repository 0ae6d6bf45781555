"""Running a step: from the scheduler's plan to tokens.

Owns the device side of a step: inputs, the model's forward pass, sampling. Why a request runs, and what becomes of
its tokens, it must not know.

`launch` hands a whole step to the device and waits for nothing: one copy up, the forward pass, sampling, one copy
down. The next step may be launched before the last one's result is there. What it needs of it are tokens, and these
are taken on the device: rows whose token is in flight get it from the last step's samples. Everything runs on one
stream, in the order of launches, so that a step reads and writes blocks after all steps before it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, islice, takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.fused.fuse import weights_bytes
from kvscope_engine.model.loading.ready_to_run import make_ready_to_run
from kvscope_engine.model.lora.adapters import LoraAdapters
from kvscope_engine.model.lora.slots import LoraSlots, StepRows
from kvscope_engine.model.memory.step_memory import StepLimits, logits_width, step_buffer_bytes
from kvscope_engine.model.roofline.launches import Kind, Launches
from kvscope_engine.model.running import step_buffer
from kvscope_engine.model.running.attention import KeptDecode, PagedContext
from kvscope_engine.model.running.attention_scores import AttentionScores, MeasuredSteps
from kvscope_engine.model.running.capture_failures import CaptureFailures
from kvscope_engine.model.running.decode_graphs import DecodeGraphs
from kvscope_engine.model.running.forward import Forward
from kvscope_engine.model.running.host_memory import keep_freed_memory
from kvscope_engine.model.running.kv_storage import KVStorage
from kvscope_engine.model.running.own_forward import OwnBatch, own_forward, states_of
from kvscope_engine.model.running.pieces.mixed_graphs import MixedGraphs
from kvscope_engine.model.running.recurrent import StateBatch, StateDecodes, StateStep
from kvscope_engine.model.running.state_storage import StateStorage
from kvscope_engine.model.running.step_buffer import StepBuffer
from kvscope_engine.model.running.step_inputs import StepInputs, TableRows, build_inputs, sampled_places
from kvscope_engine.model.running.step_tensors import StepTensors, put_inputs
from kvscope_engine.model.running.warm_up import warm_up
from kvscope_engine.model.sampling.sampler import Sampled, Sampler
from kvscope_engine.model.sparse.page_choice import PageChoice
from kvscope_engine.model.sparse.skips import SKIP_STEPS, BlockSkips
from kvscope_engine.policy.plan import Scheduled, StepPlan, StepResult
from kvscope_kernels import Ops, ops_for
from kvscope_telemetry.messages.commands import TokenLogprobs
from kvscope_telemetry.messages.sampling_params import MAX_LOGPROBS
from kvscope_telemetry.messages.telemetry import Progress

if TYPE_CHECKING:
    from kvscope_engine.model.loading.loader import LoadedModel


NUM_BUFFERS: Final = 2
"""For results on their way down: a step is read before the one after the next is handed over, or never."""
_BYTES_A_NUMBER: Final = 8


class OtherRanks(Protocol):
    """Those that run each step with this one; see `ranks.leader`."""

    def tell(
        self, inputs: StepInputs, copies: Sequence[tuple[int, int]], lora_slots: NDArray[np.int64] | None = None
    ) -> None:
        """The step that is run next; `lora_slots` as in `StepRows`."""

    def done(self) -> None:
        """Its layers were run here."""


class Measures(NamedTuple):
    """What is measured in a step; None of it: that is not."""

    shares: AttentionScores | None = None
    skips: BlockSkips | None = None


NOTHING: Final = Measures()


class ModelRunner:
    """A model, its KV storage and the sampler, ready to run steps. Prepares the model when made (fuses).

    Raises BadInput for a model whose attention cannot be served. `warm_up` before the first request, on a GPU.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        storage: KVStorage,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enforce_eager: bool = False,
        piecewise_graphs: bool = False,
        page_heat: int = 0,
        sparse_decode: float | None = None,
        others: OtherRanks | None = None,
        ops: Ops | None = None,
        notes: list[str] | None = None,
        states: StateStorage | None = None,
        lora: LoraAdapters | None = None,
        lora_slots: LoraSlots | None = None,
    ) -> None:
        self._others = others
        self._lora = lora
        self._lora_slots = lora_slots if lora is None else lora.slots
        self._storage = storage
        self._states = states
        assert (states is not None) == bool(states_of(loaded.module)), "recurrent layers need states"
        self._device = loaded.device
        self._ops = ops or ops_for(loaded.device.type)
        self._measures_shares = page_heat > 0
        self.choice: PageChoice | None = None
        """How decodes choose among their blocks; None: they attend to all."""
        if sparse_decode is not None:
            self.choice = PageChoice(sparse_decode, storage.block_size, self._ops, storage.bounds_tokens)
        self._measured = MeasuredSteps(page_heat or (SKIP_STEPS if self.choice is not None else 0))
        if loaded.device.type == "cpu":
            keep_freed_memory()
        self.fused = make_ready_to_run(loaded.module, loaded.quantization)
        self.weights_bytes = weights_bytes(loaded.module)
        self.notes: list[str] = [] if notes is None else notes
        """What is not as it was asked for, a line each, as soon as it is so; others may add to it."""
        self._model = Forward(loaded.module)
        self._is_own = own_forward(loaded.module) is not None
        self._launches = Launches(loaded.device)
        self._vocab_size = logits_width(loaded)
        self._sampler = Sampler(loaded.eos_token_ids, loaded.info.vocab_size)
        limits = StepLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_request_tokens=min(loaded.max_model_len, storage.num_blocks * storage.block_size),
            block_size=storage.block_size,
            num_groups=storage.num_groups,
        )
        self._limits = limits
        max_blocks = min(limits.max_request_blocks, storage.num_blocks)
        self._rows = TableRows(max_num_seqs, max_blocks, storage.num_groups)
        self._buffer = StepBuffer(loaded.device, step_buffer_bytes(limits, self._vocab_size))
        self._read_back = ReadBack(loaded.device, max_num_seqs * (2 + 2 * MAX_LOGPROBS))
        self._graphs: DecodeGraphs | None = None
        if loaded.device.type == "cuda" and not enforce_eager:
            self._graphs = DecodeGraphs(
                self._run_eagerly,
                self._buffer,
                self._device,
                max_num_seqs=max_num_seqs,
                max_tokens=limits.max_request_tokens,
                block_size=storage.block_size,
                num_groups=storage.num_groups,
                keeps_queries=page_heat > 0 and self.choice is None,
                is_by_length=self.choice is not None,
                pad_state=states.pad_slot if states is not None else None,
                failures=CaptureFailures(self.notes.append),
            )
        self._mixed: MixedGraphs | None = None
        if self._graphs is not None and piecewise_graphs:
            self._mixed = MixedGraphs(
                *(self._model, storage, self._ops, self._buffer),
                max_num_batched_tokens=max_num_batched_tokens,
                failures=CaptureFailures(self.notes.append),
            )

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[Progress], None]) -> None:
        """Compile every kernel that service can need and capture graphs; on a CPU there is nothing to do."""
        if self._device.type == "cpu":
            return
        nothing = torch.full((1, 2), -1, dtype=torch.int64, device=self._device)
        if self._storage.layers:
            self._ops.copy_rows(self._storage.rows, nothing)
        if self._states is not None:
            self._ops.copy_rows(self._states.rows, nothing)
        graphs = self._graphs, self._mixed
        failure = warm_up(self._limits, self._warm_measuring, self._sampler, self._buffer, *graphs, progress)
        torch.cuda.synchronize(self._device)
        if failure:
            self._give_up_graphs(failure)

    @torch.inference_mode()
    def while_idle(self) -> bool:
        """What is better done while nobody waits for a step, and none is on the device. Whether more is to be done."""
        all_graphs = [graphs for graphs in (self._graphs, self._mixed) if graphs is not None]
        any(graphs.try_again() for graphs in all_graphs)  # one size at most
        return any(graphs.failures.is_waiting for graphs in all_graphs)

    def run(self, plan: StepPlan) -> StepResult:
        """One step: copy blocks, write and attend, sample what is to be sampled."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, after: InFlight | None = None) -> InFlight:
        """Hand a step to the device; nothing is waited for.

        `after` is the last step launched, where tokens that it samples are inputs of this one.
        """
        if self._states is not None:  # first: states of requests that wait are to outlive a step that fails
            self._states.copy(plan.state_copies, self._ops.copy_rows)
        inputs = build_inputs(plan, self._rows, self._storage.block_size, after.rows() if after is not None else None)
        adapted = self._lora.rows_of(plan.scheduled) if self._lora is not None else None
        if self._others is not None:
            self._others.tell(inputs, plan.copies, adapted.slots if adapted is not None else None)
        sampling, num_output_tokens = sampled_places(plan.scheduled)
        measures = self._measures(self._measured.is_due(inputs.num_single_token))
        graphs, size = self._graphs_for(inputs) if measures.skips is None and adapted is None else (None, 0)
        buffer = self._buffer
        buffer.begin()
        tensors = put_inputs(inputs, buffer) if graphs is None else graphs.put(inputs, size)
        options = self._sampler.inputs(sampling, buffer, self._vocab_size, num_output_tokens)
        pairs = buffer.put(np.array(plan.copies, np.int64)) if plan.copies else None
        state_saves = buffer.put(_saves_after(plan)) if plan.state_saves and graphs is not None else None
        awaited = buffer.put(inputs.awaited) if inputs.awaited is not None else None
        slots = buffer.put(adapted.slots) if adapted is not None else None
        buffer.send()
        if pairs is not None and self._storage.layers:
            self._ops.copy_rows(self._storage.rows, pairs)
        if awaited is not None and after is not None:
            tensors.input_ids.index_copy_(0, awaited[0], after.tokens.index_select(0, awaited[1]))
        timer = StepTimer(self._device)
        states = _states_of(plan, self._states) if self._states is not None and graphs is None else None
        own = own_batch(inputs) if self._is_own else None
        count = len(sampling)
        kind = self._kind(inputs, count, graphs, size, is_measured=measures != NOTHING)
        with self._launches.counted(kind):
            if graphs is None:
                with self._adapted(adapted, slots):
                    logits = self._forward(tensors, count, measures, states, own)
            elif isinstance(graphs, MixedGraphs):
                logits = graphs.replay(size, count, measures.shares)
            else:
                logits = graphs.replay(size, count)
                if measures.shares is not None:
                    graphs.measure(size, inputs, tensors, measures.shares)
                if self._states is not None and state_saves is not None:
                    self._ops.copy_rows(self._states.rows, state_saves)
        timer.stop()
        if self._others is not None:
            self._others.done()
        graph_size, graph_tokens = (size, 0) if graphs is self._graphs else (0, size)
        if logits is None:
            return InFlight(plan, timer, measures=measures, graph_tokens=graph_tokens, launches=self._launches.of(kind))
        sampled = self._sampler.draw(logits, options)
        landing = self._read_back.start(sampled.packed)
        given = {"graph_size": graph_size, "graph_tokens": graph_tokens, "launches": self._launches.of(kind)}
        return InFlight(plan, timer, sampled, landing, measures, **given)

    @torch.inference_mode()
    def follow(
        self, inputs: StepInputs, copies: Sequence[tuple[int, int]], lora_slots: NDArray[np.int64] | None = None
    ) -> None:
        """This rank's part of a step that rank 0 runs: all but the head and sampling."""
        self._buffer.begin()
        tensors = put_inputs(inputs, self._buffer)
        pairs = self._buffer.put(np.array(copies, np.int64)) if copies else None
        slots = self._buffer.put(lora_slots) if lora_slots is not None else None
        self._buffer.send()
        if pairs is not None:
            self._ops.copy_rows(self._storage.rows, pairs)
        with self._adapted(StepRows(lora_slots) if lora_slots is not None else None, slots):
            self._model.fill(tensors.input_ids, tensors.positions, self._context(tensors))

    def recover(self) -> None:
        """After a step that ran out of memory: what it left is over, and memory that is only kept is given back."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def release_graphs(self) -> bool:
        """Give the memory of all CUDA graphs back: they are captured again later. Whether there were any."""
        released = [graphs.release() for graphs in (self._graphs, self._mixed) if graphs is not None]
        if any(released):
            self.notes.append("a step had no memory: the CUDA graphs' was given back, they are captured again later")
            self.recover()
        return any(released)

    def close(self) -> None:
        """Drop every tensor."""
        self._graphs = self._mixed = None
        del self._model

    def _adapted(self, rows: StepRows | None, slots: torch.Tensor | None) -> AbstractContextManager[None]:
        """Inside, the model computes a step of rows with adapters; None of them: as the model is."""
        if self._lora_slots is None or rows is None or slots is None:
            return nullcontext()
        return self._lora_slots.applied(rows, slots)

    def _kind(
        self,
        inputs: StepInputs,
        count: int,
        graphs: DecodeGraphs | MixedGraphs | None,
        size: int,
        *,
        is_measured: bool,
    ) -> Kind | None:
        pieces = graphs.num_graphs(size) if isinstance(graphs, MixedGraphs) else int(graphs is not None)
        is_graph = isinstance(graphs, DecodeGraphs) and not is_measured
        return self._launches.kind(inputs, count, in_graph=is_graph, num_pieces=pieces, is_measured=is_measured)

    def _graphs_for(self, inputs: StepInputs) -> tuple[DecodeGraphs | MixedGraphs | None, int]:
        """Those that run a step, and of what size; None: it runs eagerly. Captures what is wanted again."""
        if self._graphs is not None and (size := self._graphs.size_of(inputs)) is not None:
            return self._graphs, size
        if self._mixed is not None and (size := self._mixed.size_of(inputs)) is not None:
            return self._mixed, size
        return None, 0

    def _give_up_graphs(self, failure: str) -> None:
        self._graphs = self._mixed = None
        self.notes.append(f"CUDA graphs could not be captured, steps run without them (slower): {failure}")

    def _forward(
        self,
        tensors: StepTensors,
        num_samples: int,
        measures: Measures,
        states: StateBatch | None,
        own: OwnBatch | None,
    ) -> torch.Tensor | None:
        """Logits of the sampled rows, (num_samples, vocabulary); None when nothing is sampled."""
        context = self._context(tensors, measures, states, own)
        if not num_samples:
            self._model.fill(tensors.input_ids, tensors.positions, context)
            return None
        return self._model.logits(tensors.input_ids, tensors.positions, context, tensors.sample_rows)

    def _run_eagerly(self, tensors: StepTensors, kept: list[KeptDecode] | None) -> torch.Tensor:
        """Logits of all rows. A context of its own each time: what layers share is made in the graph that reads it."""
        states = None
        if self._states is not None and tensors.state_slots is not None:
            states = StateDecodes(self._states, tensors.state_slots)
        context = self._context(tensors, states=states)
        context.kept = kept
        return self._model.logits(tensors.input_ids, tensors.positions, context)

    def _warm_measuring(self, tensors: StepTensors) -> torch.Tensor:
        """The same, measured where service measures. Of a model that is run by its own code no kernels are known."""
        if self._is_own:
            return torch.zeros(len(tensors.input_ids), self._vocab_size, device=self._device)
        measures = self._measures(self._measured.any(tensors.num_single_token))
        return self._model.logits(tensors.input_ids, tensors.positions, self._context(tensors, measures))

    def _measures(self, is_due: bool) -> Measures:
        if not is_due:
            return NOTHING
        shares = AttentionScores(self._ops) if self._measures_shares else None
        return Measures(shares, BlockSkips() if self.choice is not None else None)

    def _context(
        self,
        tensors: StepTensors,
        measures: Measures = NOTHING,
        states: StateStep | None = None,
        own: OwnBatch | None = None,
    ) -> PagedContext:
        return PagedContext(
            *(self._storage, self._ops, tensors.slot_mapping, tensors.num_single_token),
            decode=tensors.decode,
            prefill=tensors.prefill,
            shares=measures.shares,
            choice=self.choice,
            skips=measures.skips,
            states=states,
            own=own,
        )


def own_batch(inputs: StepInputs) -> OwnBatch:
    """What the host knows of a step's sequences."""
    return OwnBatch(inputs.query_start.tolist(), inputs.seq_lens.tolist(), inputs.sample_rows.tolist())


def _saves_after(plan: StepPlan) -> NDArray[np.int64]:
    """(n, 2): of decodes alone, from which slots to which; each is of the state after its token."""
    return np.array([(save.request.state_slot, save.slot) for save in plan.state_saves], np.int64)


def _states_of(plan: StepPlan, storage: StateStorage) -> StateBatch:
    """The states of the plan's sequences."""
    starts = [0, *accumulate(item.num_tokens for item in plan.scheduled)]
    places = {item.request.number: number for number, item in enumerate(plan.scheduled)}
    saves: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for save in plan.state_saves:
        number = places[save.request.number]
        row = starts[number] + save.num_tokens - plan.scheduled[number].start
        saves[number].append((row, save.slot))
    slots = [item.request.state_slot for item in plan.scheduled]
    return StateBatch(storage, slots, [item.start > 0 for item in plan.scheduled], starts, saves)


class InFlight:
    """A step that was handed to the device: its tokens there, for the next one, and its results once they are here.

    Made by `ModelRunner.launch`; nothing waits but `result`. `sampled` and `landing` are None where nothing is sampled.
    """

    def __init__(
        self,
        plan: StepPlan,
        timer: StepTimer,
        sampled: Sampled | None = None,
        landing: Landing | None = None,
        measures: Measures = NOTHING,
        *,
        graph_size: int = 0,
        launches: int = 0,
        graph_tokens: int = 0,
    ) -> None:
        self._plan = plan
        self._timer = timer
        self._sampled = sampled
        self._landing = landing
        self._measures = measures
        self._graph_size = graph_size
        self._launches = launches
        self._graph_tokens = graph_tokens

    @property
    def tokens(self) -> torch.Tensor:
        """(rows that sample,) int64, on the device."""
        assert self._sampled is not None, "this step samples nothing that could be waited for"
        return self._sampled.tokens

    def rows(self) -> dict[int, int]:
        """Of `tokens`, by the number of the request."""
        sampling = (item.request.number for item in self._plan.scheduled if item.samples)
        return {number: row for row, number in enumerate(sampling)}

    def result(self) -> StepResult:
        """What came out; waits until it is here."""
        scheduled, asked_ns = self._plan.scheduled, time.monotonic_ns()
        shares, skips = self._measures
        rows = shares.rows() if shares is not None else None
        skipped = skips.rows() if skips is not None else None
        if self._sampled is None or self._landing is None:
            forward_ns = self._timer.elapsed_ns()
            wait_ns = time.monotonic_ns() - asked_ns
            return StepResult(
                token_ids=((),) * len(scheduled),
                forward_ns=forward_ns,
                block_shares=rows,
                graph_tokens=self._graph_tokens,
                wait_ns=wait_ns,
                block_skips=skipped,
                launches=self._launches,
            )
        numbers = self._landing.numbers()
        wait_ns = time.monotonic_ns() - asked_ns
        token_ids, logprobs = self._sampled.read(numbers)
        return StepResult(
            token_ids=(said := _spread(scheduled, token_ids)),
            logprobs=_spread_logprobs(scheduled, said, logprobs),
            forward_ns=self._timer.elapsed_ns(),
            block_shares=rows,
            graph_size=self._graph_size,
            graph_tokens=self._graph_tokens,
            wait_ns=wait_ns,
            block_skips=skipped,
            launches=self._launches,
        )


class StepTimer:
    """Time of the forward pass: by the host's clock, on a GPU by events, which do not wait."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (_timing_event(), _timing_event())
            self._events[0].record()
        self._started_ns = self._stopped_ns = time.monotonic_ns()

    def stop(self) -> None:
        """The forward pass has been handed to the device."""
        if self._events is not None:
            self._events[1].record()
        self._stopped_ns = time.monotonic_ns()

    def elapsed_ns(self) -> int:
        """Nanoseconds of the pass; waits for it."""
        if self._events is None:
            return self._stopped_ns - self._started_ns
        self._events[1].synchronize()
        return int(self._events[0].elapsed_time(self._events[1]) * 1e6)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _spread(scheduled: Sequence[Scheduled], token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    tokens = iter(token_ids)
    return tuple(_said(item.drafts, tokens) if item.samples else () for item in scheduled)


def _said(drafts: tuple[int, ...], tokens: Iterator[int]) -> tuple[int, ...]:
    """Of an item's sampled tokens those up to the first that its draft did not guess: what follows it was computed
    from something else. Each is what it would be had nothing been guessed: a position has its own random number."""
    sampled = tuple(islice(tokens, 1 + len(drafts)))
    num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, sampled, strict=False)))
    return sampled[: num_right + 1]


def _spread_logprobs(
    scheduled: Sequence[Scheduled], token_ids: Sequence[tuple[int, ...]], logprobs: Sequence[TokenLogprobs | None]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Empty stays empty: nobody asked."""
    if not logprobs:
        return ()
    sampled = iter(logprobs)
    entries = (islice(sampled, 1 + len(item.drafts)) if item.samples else () for item in scheduled)
    found = (tuple(of_item)[: len(tokens)] for of_item, tokens in zip(entries, token_ids, strict=True))
    return tuple(tuple(entry for entry in of_item if entry is not None) for of_item in found)


class Landing:
    """Numbers that have come, or are on their way."""

    def __init__(self, host: torch.Tensor, numbers: Any, event: torch.cuda.Event | None) -> None:
        self._host = host
        self._numbers = numbers
        self._event = event

    def numbers(self) -> list[Any]:
        """As Python's: the one place where a step waits for the device to tell it something."""
        if self._event is None:
            on_host: list[Any] = self._host.tolist()
            return on_host
        self._event.synchronize()
        landed: list[Any] = self._numbers.tolist()
        return landed


class ReadBack:
    """Brings one vector of int64 or float64 a step to the host, into pinned memory by a copy that nobody waits for.

    Two buffers take turns: the numbers of one step are read while those of the next come.
    """

    def __init__(self, device: torch.device, num_numbers: int) -> None:
        self._is_host = device.type == "cpu"
        self._buffers = [] if self._is_host else [_Buffer(num_numbers) for _ in range(NUM_BUFFERS)]

    def start(self, vector: torch.Tensor) -> Landing:
        """`vector` starts to come down; what `start` gave before the last call must have been read."""
        if self._is_host:
            return Landing(vector, None, None)
        self._buffers.reverse()
        return self._buffers[0].start(vector)


class _Buffer:
    """Pinned memory for one step's numbers."""

    def __init__(self, num_numbers: int) -> None:
        self._room = 0
        self._grow(num_numbers)

    def start(self, vector: torch.Tensor) -> Landing:
        count = len(vector)
        if count > self._room:
            self._grow(count)
        kind = torch.float64 if vector.dtype == torch.float64 else torch.int64
        host = self._host.view(kind)[:count]
        host.copy_(vector, non_blocking=True)
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Landing(host, self._bytes.view("float64" if kind == torch.float64 else "int64")[:count], event)

    def _grow(self, num_numbers: int) -> None:
        self._room = num_numbers
        self._host, self._bytes = step_buffer.pinned_bytes(_BYTES_A_NUMBER * num_numbers)
