"""Runs a step on the device: from the scheduler's plan to sampled tokens.

Owns the device side of a step: input tensors, the model's forward pass, sampling. Must not know why a request is
scheduled or what happens to its tokens.

`ModelRunner.launch` enqueues a whole step on the device without waiting: one host-to-device copy, the forward pass,
sampling, one device-to-host copy. The next step may be launched before the previous result has arrived. Rows whose
input token is still in flight read it on the device from the previous step's samples. If a row's grammar or penalties
depend on such a token, the host must know it before it can sample: `launch` then ends with the logits, and
`InFlight.sample` enqueues the rest. Everything runs on one stream in launch order, so a step reads and writes blocks
after all steps before it.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, islice, takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.batch_invariance.fixed_tiles import FixedTiles
from kvscope_engine.model.cuda_graphs.capture_failures import CaptureFailures
from kvscope_engine.model.cuda_graphs.decode_graphs import DecodeGraphs
from kvscope_engine.model.cuda_graphs.graphs_together import GraphsTogether, Meeting
from kvscope_engine.model.cuda_graphs.host_reads import HostReads
from kvscope_engine.model.cuda_graphs.piecewise.mixed_graphs import MixedGraphs
from kvscope_engine.model.device_memory.read_back import NUM_BUFFERS, Pinned, Rows, RowsBack, Wait, synchronize
from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.input_batch.step_inputs import StepInputs, TableRows, build_inputs, sampled_places
from kvscope_engine.model.input_batch.step_tensors import StepTensors, put_inputs, table_width
from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.kv_cache.state_storage import StateStorage
from kvscope_engine.model.layers.attention.attention_scores import AttentionScores, MeasuredSteps
from kvscope_engine.model.layers.attention.paged_attention import PagedContext
from kvscope_engine.model.layers.attention.sparse.block_skips import SKIP_STEPS, BlockSkips
from kvscope_engine.model.layers.attention.sparse.page_choice import PageChoice
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.layers.fused.fused_experts import FusedExperts
from kvscope_engine.model.layers.lora.lora_adapters import LoraAdapters
from kvscope_engine.model.layers.lora.lora_slots import LoraSlots, StepRows
from kvscope_engine.model.layers.own_forward import OwnBatch, own_forward, states_of
from kvscope_engine.model.layers.recurrent.recurrent_layers import StateBatch, StateDecodes, StateStep
from kvscope_engine.model.layers.sampling.sampler import Sampler, SamplerOutput
from kvscope_engine.model.layers.sampling.sampling_inputs import SamplingInputs
from kvscope_engine.model.layers.weight_bytes import weights_bytes
from kvscope_engine.model.platforms.host_allocator import keep_freed_memory
from kvscope_engine.model.runner.kernel_launches import Kind, Launches
from kvscope_engine.model.runner.step_memory import StepLimits, logits_width, step_buffer_bytes
from kvscope_engine.model.runner.warm_up import idle_decodes, warm_up
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan, StepResult, keep_items
from kvscope_kernels import Ops, ops_for
from kvscope_telemetry.messages.commands import TokenLogprobs
from kvscope_telemetry.messages.sampling_params import MAX_LOGPROBS
from kvscope_telemetry.messages.telemetry import Progress

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel


class OtherRanks(Protocol):
    """Sends each step to the other ranks of tensor parallelism; implemented in `executor.leader`."""

    def tell(
        self,
        inputs: StepInputs,
        copies: Sequence[tuple[int, int]],
        lora_slots: NDArray[np.int64] | None = None,
        num_sampled: int = 0,
        graph_size: int = 0,
    ) -> None:
        """Send the next step to the other ranks.

        Args:
            inputs: Arrays of the step.
            copies: Blocks to copy before the step, as (source, target) pairs.
            lora_slots: Adapter slot of each row, as in `StepRows`.
            num_sampled: Number of tokens that the previous step sampled and that `share` sends first, if this step
                awaits any.
            graph_size: Size of the CUDA graph that all ranks replay; 0 if none.
        """

    def share(self, tokens: torch.Tensor) -> None:
        """Broadcast the tokens sampled by the previous step. `tokens` is on the device."""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait until the device has reached `event`. Raises KvscopeError when a rank is lost."""

    def done(self) -> None:
        """Report that this rank has run the step's layers."""


class Measures(NamedTuple):
    """Accumulators of what is measured in a step; a field is None if it is not measured."""

    shares: AttentionScores | None = None
    skips: BlockSkips | None = None


class Readings(NamedTuple):
    """Measurements on their way to the host; a field is None if it was not measured or no layer recorded it."""

    shares: Rows | None = None
    skips: Rows | None = None


NOTHING: Final = Measures()
UNREAD: Final = Readings()


class ModelRunner:
    """Runs steps on a model, its KV storage and a sampler. The constructor prepares the model (fuses its layers).

    Raises BadInput for a model whose attention is not supported. On a GPU, call `warm_up` before the first request.
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
        together: bool = False,
        page_heat: int = 0,
        sparse_decode: float | None = None,
        others: OtherRanks | None = None,
        ops: Ops | None = None,
        notes: list[str] | None = None,
        states: StateStorage | None = None,
        max_drafts: int = 0,
        lora: LoraAdapters | None = None,
        lora_slots: LoraSlots | None = None,
        tiles: Sequence[int] = (),
        fingerprints: bool = False,
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
        """Choice of blocks by decodes (sparse attention); None if they attend to all blocks."""
        if sparse_decode is not None:
            self.choice = PageChoice(sparse_decode, storage.block_size, self._ops, storage.bounds_tokens)
        self._measured = MeasuredSteps(page_heat or (SKIP_STEPS if self.choice is not None else 0))
        if loaded.device.type == "cpu":
            keep_freed_memory()
        self.fused = make_ready_to_run(loaded.module, loaded.quantization)
        self.weights_bytes = weights_bytes(loaded.module)
        self.notes: list[str] = [] if notes is None else notes
        """Lines of text about options that could not be applied as requested, added when that is found. Other
        components may append to it."""
        self._module = loaded.module
        self._model = Forward(loaded.module)
        self._tiles: FixedTiles | None = None
        if tiles:
            self._tiles = FixedTiles(self._model, storage, self._ops, tiles[0], tiles[1:])
        self._sums_logits = fingerprints
        self._is_own = own_forward(loaded.module) is not None
        self._launches = Launches(loaded.device)
        self._vocab_size = logits_width(loaded)
        self._sampler = Sampler(loaded.eos_token_ids, loaded.info.vocab_size, self._ops)
        limits = StepLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_request_tokens=min(loaded.max_model_len, storage.num_blocks * storage.block_size),
            block_size=storage.block_size,
            num_groups=storage.num_groups,
            has_experts=any(isinstance(part, FusedExperts) for part in loaded.module.modules()),
            max_drafts=max_drafts,
        )
        self._limits = limits
        max_blocks = min(limits.max_request_blocks, storage.num_blocks)
        self._rows = TableRows(max_num_seqs, max_blocks, storage.num_groups)
        self._buffer = StepBuffer(loaded.device, step_buffer_bytes(limits, self._vocab_size))
        self._wait = synchronize if others is None else others.wait_for
        self._read_back = ReadBack(loaded.device, max_num_seqs * (2 + 2 * MAX_LOGPROBS), self._wait)
        num_shares = max_num_seqs * table_width(limits.max_request_tokens, storage.block_size) * storage.num_groups
        self._shares_back, self._skips_back = (RowsBack(loaded.device, num_shares, self._wait) for _ in range(2))
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
                measures=page_heat > 0 and self.choice is None,
                is_by_length=self.choice is not None,
                pad_state=states.pad_slot if states is not None else None,
                max_drafts=max_drafts,
                failures=CaptureFailures(self.notes.append),
            )
        self._together: GraphsTogether | None = None
        """CUDA graphs shared by several ranks; None with a single rank or without graphs."""
        if together:
            if self.choice is not None:  # each rank would choose its own graph length
                self._graphs = None
            if self._graphs is not None:
                self._together = GraphsTogether(self._graphs)
        self._copies_made: deque[tuple[tuple[int, int], ...]] = deque(maxlen=2)
        """Block copies made for the last two plans.

        When a failed step is run again, its copies are not repeated: by then, their source blocks may belong to other
        requests.
        """
        self._mixed: MixedGraphs | None = None
        if self._graphs is not None and piecewise_graphs:
            self._mixed = MixedGraphs(
                self._model,
                storage,
                self._ops,
                self._buffer,
                max_num_batched_tokens=max_num_batched_tokens,
                failures=CaptureFailures(self.notes.append),
            )

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[Progress], None]) -> None:
        """Compile every kernel that steps can need and capture CUDA graphs. Does nothing on a CPU."""
        if self._device.type == "cpu":
            return
        nothing = torch.full((1, 2), -1, dtype=torch.int64, device=self._device)
        if self._storage.layers:
            self._ops.copy_rows(self._storage.rows, nothing)
        if self._states is not None:
            self._ops.copy_rows(self._states.rows, nothing)
        if self._graphs is not None and not self._is_own and (reads := self._host_reads()):
            self._give_up_graphs(reads)
        graphs = (self._graphs, self._mixed) if self._together is None else (None, None)
        failure = warm_up(self._limits, self._warm_measuring, self._sampler, self._buffer, *graphs, progress)
        torch.cuda.synchronize(self._device)
        if failure:
            self._give_up_graphs(failure)

    @property
    def captures_together(self) -> bool:
        """Whether all ranks must call `capture_together` if this rank does."""
        return self._together is not None and not self._together.is_refused

    @torch.inference_mode()
    def capture_together(self, meeting: Meeting) -> None:
        """Capture CUDA graphs on all ranks at once, after the all-reduces are installed and before the first
        request."""
        assert self._together is not None, "there are graphs of several ranks"
        self.notes += self._together.capture_all(meeting)
        torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def while_idle(self) -> bool:
        """Do deferred work while no request is waiting and no step is in flight: capture at most one CUDA graph size
        again.

        Returns whether more work remains.
        """
        if self._together is not None:
            return False
        all_graphs = [graphs for graphs in (self._graphs, self._mixed) if graphs is not None]
        any(graphs.try_again() for graphs in all_graphs)  # one size at most
        return any(graphs.is_waiting for graphs in all_graphs)

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, after: InFlight | None = None) -> InFlight:
        """Enqueue a step on the device without waiting for anything.

        `after` is the step launched before this one, if its result has not been committed yet.
        """
        if self._states is not None:  # first: states of waiting requests must survive a failed step
            self._states.copy(plan.state_copies, self._ops.copy_rows)
        inputs = build_inputs(plan, self._rows, self._storage.block_size, after.rows() if after is not None else None)
        adapted = self._lora.rows_of(plan.scheduled) if self._lora is not None else None
        sampling, num_output_tokens = sampled_places(plan.scheduled)
        measures = self._measures(is_due=self._measured.is_due(inputs.num_single_token))
        copies = () if any(plan.copies is made for made in self._copies_made) else plan.copies
        graphs, size = self._graphs_for(inputs, measures) if measures.skips is None and adapted is None else (None, 0)
        if self._others is not None:
            num_sampled = len(after.tokens) if after is not None and inputs.awaited is not None else 0
            self._others.tell(inputs, copies, adapted.slots if adapted is not None else None, num_sampled, size)
        buffer = self._buffer
        buffer.begin()
        tensors = put_inputs(inputs, buffer) if graphs is None else graphs.put(inputs, size)
        is_late = after is not None and _follow_what_is_awaited(sampling, num_output_tokens)
        options = None if is_late else self._sampler.inputs(sampling, buffer, self._vocab_size, num_output_tokens)
        pairs = buffer.put(np.array(copies, np.int64)) if copies else None
        state_saves = buffer.put(_saves_after(plan)) if plan.state_saves and graphs is not None else None
        awaited = buffer.put(inputs.awaited) if inputs.awaited is not None else None
        slots = buffer.put(adapted.slots) if adapted is not None else None
        buffer.send()
        if pairs is not None and self._storage.layers:
            self._ops.copy_rows(self._storage.rows, pairs)
            self._copies_made.append(copies)
        if awaited is not None and after is not None:
            if self._others is not None:
                self._others.share(after.tokens)
            tensors.input_ids.index_copy_(0, awaited[0], after.tokens.index_select(0, awaited[1]))
        timer = StepTimer(self._device, self._wait)
        states = _states_of(plan, self._states) if self._states is not None and graphs is None else None
        own = own_batch(inputs) if self._is_own else None
        count = len(sampling)
        kind = self._kind(inputs, count, graphs, size, is_measured=measures != NOTHING)
        with self._launches.counted(kind):
            if self._tiles is not None:
                logits = self._tiles.logits(inputs)
            elif graphs is None:
                with self._adapted(adapted, slots):
                    logits = self._forward(tensors, count, measures, states, own)
            elif isinstance(graphs, MixedGraphs):
                logits = graphs.replay(size, count, measures.shares)
            else:
                logits = graphs.replay(size, count)
                if self._states is not None and state_saves is not None:
                    self._ops.copy_rows(self._states.rows, state_saves)
        timer.stop()
        readings = self._readings(measures, graphs, size, inputs)
        if self._others is not None:
            self._others.done()
        graph_size, graph_tokens = 0, size
        if isinstance(graphs, DecodeGraphs):
            graph_size, graph_tokens = graphs.num_requests, 0
        if logits is None:
            return InFlight(plan, timer, readings=readings, graph_tokens=graph_tokens, launches=self._launches.of(kind))
        sums = logit_sums(logits) if self._sums_logits else ()  # before the sampler changes them
        given = {"graph_size": graph_size, "graph_tokens": graph_tokens, "launches": self._launches.of(kind)}
        if options is None:
            later = partial(self._sample_later, logits, sampling, num_output_tokens)
            return InFlight(plan, timer, None, later, readings, sums, **given)
        return InFlight(plan, timer, self._sample(logits, options), None, readings, sums, **given)

    @torch.inference_mode()
    def follow(
        self,
        inputs: StepInputs,
        copies: Sequence[tuple[int, int]],
        lora_slots: NDArray[np.int64] | None = None,
        sampled: torch.Tensor | None = None,
        graph_size: int = 0,
    ) -> None:
        """Run this rank's part of a step that rank 0 leads: everything but sampling, and the head only if a graph
        contains it.

        `sampled`: tokens of the previous step, if this step awaits any.
        """
        self._buffer.begin()
        graphs = self._graphs if graph_size else None
        tensors = put_inputs(inputs, self._buffer) if graphs is None else graphs.put(inputs, graph_size)
        pairs = self._buffer.put(np.array(copies, np.int64)) if copies else None
        slots = self._buffer.put(lora_slots) if lora_slots is not None else None
        awaited = self._buffer.put(inputs.awaited) if inputs.awaited is not None else None
        self._buffer.send()
        if pairs is not None:
            self._ops.copy_rows(self._storage.rows, pairs)
        if awaited is not None and sampled is not None:
            tensors.input_ids.index_copy_(0, awaited[0], sampled.index_select(0, awaited[1]))
        if graphs is not None:
            graphs.replay(graph_size, inputs.num_tokens)
            return
        with self._adapted(StepRows(lora_slots) if lora_slots is not None else None, slots):
            self._model.fill(tensors.input_ids, tensors.positions, self._context(tensors))

    @torch.inference_mode()
    def is_well(self) -> bool:
        """Whether the device still computes after a failed step.

        An illegal address or a failed assertion makes the CUDA context unusable. Always False with several ranks,
        because other ranks may be waiting for this one.
        """
        if self._others is not None:
            return False
        try:
            return torch.ones(2, device=self._device).sum().item() == 2
        except torch.OutOfMemoryError:  # the failed step's memory is not released yet
            return True
        except RuntimeError:
            return False

    def recover(self) -> None:
        """Wait until the device is idle after a failed step, and release cached memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def release_graphs(self) -> bool:
        """Release the memory of all CUDA graphs; they are captured again later. Returns whether there were any.

        Graphs that several ranks run together are kept.
        """
        if self._together is not None:
            return False
        released = [graphs.release() for graphs in (self._graphs, self._mixed) if graphs is not None]
        if any(released):
            self.notes.append("a step failed twice: CUDA graphs and their memory were given back, to be captured later")
            self.recover()
        return any(released)

    @property
    def has_graphs(self) -> bool:
        """Whether CUDA graphs exist, or will be captured again, that a single process can release."""
        return self._graphs is not None and self._together is None

    def keep_graphs(self, *, of_decodes: bool, of_prefills: bool) -> None:
        """Keep only the CUDA graphs of these kinds of steps, to save memory.

        Memory of the other graphs is released, and they are not captured again until a call requests them. No step may
        be in flight. Does nothing with several ranks.
        """
        if self._together is not None:
            return
        for graphs, is_kept in ((self._graphs, of_decodes), (self._mixed, of_prefills)):
            if graphs is not None:
                graphs.failures.hold(not is_kept)
                if not is_kept and graphs.release():
                    self.recover()

    def close(self) -> None:
        self._graphs = self._mixed = self._together = self._tiles = None
        del self._model, self._module

    def _sample(self, logits: torch.Tensor, options: SamplingInputs) -> PendingSamples:
        sampled = self._sampler.draw(logits, options)
        return PendingSamples(sampled, self._read_back.start(sampled.packed))

    @torch.inference_mode()
    def _sample_later(
        self, logits: torch.Tensor, sampling: list[Request], num_output_tokens: list[int]
    ) -> PendingSamples:
        """Sample in a step whose sampling inputs were not known at launch, with a host-to-device copy of their own."""
        self._buffer.begin()
        options = self._sampler.inputs(sampling, self._buffer, self._vocab_size, num_output_tokens)
        self._buffer.send()
        return self._sample(logits, options)

    def _adapted(self, rows: StepRows | None, slots: torch.Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which the model applies the LoRA adapters of `rows`; without adapters, an empty
        context."""
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
        in_graph = isinstance(graphs, DecodeGraphs)
        return self._launches.kind(inputs, count, in_graph=in_graph, num_pieces=pieces, is_measured=is_measured)

    def _graphs_for(self, inputs: StepInputs, measures: Measures) -> tuple[DecodeGraphs | MixedGraphs | None, int]:
        """Return the graphs and the graph size that run a step, or (None, 0) if it runs eagerly. Captures graphs that
        were released.

        Decode graphs do not run drafted steps whose attention is measured: in a graph, the attention of drafted
        requests is not separate from that of the decodes.
        """
        if self._together is not None:
            shared = self._together.size_of(inputs)
            return (None, 0) if shared is None else (self._graphs, shared)
        is_apart = inputs.is_drafted and measures.shares is not None
        if self._graphs is not None and not is_apart and (size := self._graphs.size_of(inputs)) is not None:
            return self._graphs, size
        if self._mixed is not None and (size := self._mixed.size_of(inputs)) is not None:
            return self._mixed, size
        return None, 0

    def _host_reads(self) -> str:
        """Describe the operations of a decode step that no CUDA graph can contain; empty if there are none."""
        self._buffer.begin()
        tensors = idle_decodes(self._limits, self._buffer)
        self._buffer.send()
        with HostReads(self._module, self._device) as reads:
            self._run_eagerly(tensors, None)
        return reads.words

    def _give_up_graphs(self, failure: str) -> None:
        self._graphs = self._mixed = None
        if self._together is not None:  # other ranks may capture and must learn that this one does not
            self._together.refuse(failure)
        self.notes.append(f"CUDA graphs could not be captured, steps run without them (slower): {failure}")

    def _forward(
        self,
        tensors: StepTensors,
        num_samples: int,
        measures: Measures,
        states: StateBatch | None,
        own: OwnBatch | None,
    ) -> torch.Tensor | None:
        """Return the logits of the sampled rows, (num_samples, vocabulary), or None when nothing is sampled."""
        context = self._context(tensors, measures, states, own)
        if not num_samples:
            self._model.fill(tensors.input_ids, tensors.positions, context)
            return None
        return self._model.logits(tensors.input_ids, tensors.positions, context, tensors.sample_rows)

    def _readings(
        self, measures: Measures, graphs: DecodeGraphs | MixedGraphs | None, size: int, inputs: StepInputs
    ) -> Readings:
        """Start copying measurements to the host, before the tokens."""
        shares, skips = measures
        return Readings(
            None
            if shares is None
            else graphs.shares_of(size, inputs, self._shares_back)
            if isinstance(graphs, DecodeGraphs)
            else shares.start(self._shares_back),
            None if skips is None else skips.start(self._skips_back),
        )

    def _run_eagerly(self, tensors: StepTensors, shares: AttentionScores | None) -> torch.Tensor:
        """Return the logits of all rows. Each call uses a new context, because tensors shared by layers must be created
        in the graph that reads them."""
        states = None
        if self._states is not None and tensors.state_slots is not None:
            states = StateDecodes(self._states, tensors.state_slots)
        context = self._context(tensors, Measures(shares), states)
        return self._model.logits(tensors.input_ids, tensors.positions, context)

    def _warm_measuring(self, tensors: StepTensors) -> torch.Tensor:
        """Return the logits of all rows of a warm-up step, and run the step a second time with measurement if service
        measures such steps.

        A model that runs its own forward code is skipped, since its kernels are unknown. Fixed tiles have one shape,
        whatever the step.
        """
        if self._tiles is not None:
            return self._tiles.run_idle()
        if self._is_own:
            return torch.zeros(len(tensors.input_ids), self._vocab_size, device=self._device)
        measures = self._measures(is_due=self._measured.any(tensors.num_single_token))
        if measures.shares is not None:
            self._model.logits(tensors.input_ids, tensors.positions, self._context(tensors, measures))
            measures.shares.start(self._shares_back)
        return self._model.logits(tensors.input_ids, tensors.positions, self._context(tensors))

    def _measures(self, *, is_due: bool) -> Measures:
        if not is_due:
            return NOTHING
        shares = AttentionScores() if self._measures_shares else None
        return Measures(shares, BlockSkips() if self.choice is not None else None)

    def _context(
        self,
        tensors: StepTensors,
        measures: Measures = NOTHING,
        states: StateStep | None = None,
        own: OwnBatch | None = None,
    ) -> PagedContext:
        return PagedContext(
            self._storage,
            self._ops,
            tensors.slot_mapping,
            tensors.num_single_token,
            decode=tensors.decode,
            prefill=tensors.prefill,
            shares=measures.shares,
            choice=self.choice,
            skips=measures.skips,
            states=states,
            own=own,
        )


def _follow_what_is_awaited(requests: Sequence[Request], num_output_tokens: Sequence[int]) -> bool:
    """Whether sampling any row depends on a token that is still in flight (its grammar or penalties follow its
    tokens)."""
    return any(
        count > len(request.output_token_ids) and request.depends_on_tokens
        for request, count in zip(requests, num_output_tokens, strict=True)
    )


def own_batch(inputs: StepInputs) -> OwnBatch:
    return OwnBatch(inputs.query_start.tolist(), inputs.seq_lens.tolist(), inputs.sample_rows.tolist())


def _saves_after(plan: StepPlan) -> NDArray[np.int64]:
    """Return (source slot, target slot) pairs, shape (n, 2), of a decode-only step. Each saves the state after the
    request's token."""
    return np.array([(save.request.state_slot, save.slot) for save in plan.state_saves], np.int64)


def _states_of(plan: StepPlan, storage: StateStorage) -> StateBatch:
    starts = [0, *accumulate(item.num_tokens for item in plan.scheduled)]
    places = {item.request.number: number for number, item in enumerate(plan.scheduled)}
    saves: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for save in plan.state_saves:
        number = places[save.request.number]
        row = starts[number] + save.num_tokens - plan.scheduled[number].start
        saves[number].append((row, save.slot))
    slots = [item.request.state_slot for item in plan.scheduled]
    goes_on = [item.start > 0 for item in plan.scheduled]
    in_prompt = [item.start < item.request.num_prompt_tokens for item in plan.scheduled]
    return StateBatch(storage, slots, goes_on, starts, saves, in_prompt)


class InFlight:
    """A step enqueued on the device: its sampled tokens there, for the next step, and its results once they arrive.

    Made by `ModelRunner.launch`. Only `result` waits. `drawn` is None if nothing is sampled, or if only `later` can
    sample.
    """

    def __init__(
        self,
        plan: StepPlan,
        timer: StepTimer,
        drawn: PendingSamples | None = None,
        later: Callable[[], PendingSamples] | None = None,
        readings: Readings = UNREAD,
        logit_sums: Sequence[int] = (),
        *,
        graph_size: int = 0,
        launches: int = 0,
        graph_tokens: int = 0,
    ) -> None:
        self._plan = plan
        self._timer = timer
        self._drawn = drawn
        self._later = later
        self._is_left: list[bool] = []
        self._readings = readings
        self._logit_sums = logit_sums
        self._graph_size = graph_size
        self._launches = launches
        self._graph_tokens = graph_tokens

    @property
    def tokens(self) -> torch.Tensor:
        """Sampled tokens on the device, (rows that sample,) int64."""
        assert self._drawn is not None, "this step samples nothing yet that could be waited for"
        return self._drawn.sampled.tokens

    def rows(self) -> dict[int, int]:
        """Return the row of each request in `tokens`, keyed by request number."""
        sampling = (item.request.number for item in self._plan.scheduled if item.samples)
        return {number: row for row, number in enumerate(sampling)}

    def sample(self) -> StepPlan:
        """Enqueue the sampling that `launch` deferred, once the previous step has been committed. Returns the remaining
        plan.

        Requests whose grammar mask is not ready, and finished requests, are removed from the plan. Their rows are
        sampled anyway and dropped.
        """
        if self._later is not None:
            later, self._later = self._later, None
            requests = [item.request for item in self._plan.scheduled if item.samples]
            is_left = {request: not (request.awaits_grammar_mask or request.is_finished) for request in requests}
            self._is_left = [is_left.get(item.request, True) for item in self._plan.scheduled]
            self._drawn = later()
        return keep_items(self._plan, _nothing_said(self._plan), self._is_left)[0] if self._is_left else self._plan

    def result(self) -> StepResult:
        """Wait for the step and return the results of the requests that `sample` left in the plan."""
        self.sample()
        result = self._result()
        return keep_items(self._plan, result, self._is_left)[1] if self._is_left else result

    def _result(self) -> StepResult:
        scheduled, asked_ns = self._plan.scheduled, time.monotonic_ns()
        numbers = self._drawn.landing.numbers() if self._drawn is not None else []
        shares, skips = self._readings  # copied before the tokens, or concurrently
        rows, skipped = (shares() if shares is not None else None), (skips() if skips is not None else None)
        if self._drawn is None:
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
        wait_ns = time.monotonic_ns() - asked_ns
        token_ids, logprobs = self._drawn.sampled.read(numbers)
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
            logit_sums=_spread_sums(scheduled, said, self._logit_sums),
        )


class PendingSamples(NamedTuple):
    sampled: SamplerOutput
    landing: Landing


def _nothing_said(plan: StepPlan) -> StepResult:
    return StepResult(((),) * len(plan.scheduled))


class StepTimer:
    """Measures the time of a forward pass: with the host's clock on a CPU, with non-blocking events on a GPU."""

    def __init__(self, device: torch.device, wait: Wait) -> None:
        self._wait = wait
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (_timing_event(), _timing_event())
            self._events[0].record()
        self._started_ns = self._stopped_ns = time.monotonic_ns()

    def stop(self) -> None:
        """Record the end of the forward pass, after it was enqueued."""
        if self._events is not None:
            self._events[1].record()
        self._stopped_ns = time.monotonic_ns()

    def elapsed_ns(self) -> int:
        """Wait for the pass and return its duration in nanoseconds."""
        if self._events is None:
            return self._stopped_ns - self._started_ns
        self._wait(self._events[1])
        return int(self._events[0].elapsed_time(self._events[1]) * 1e6)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _spread(scheduled: Sequence[Scheduled], token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    tokens = iter(token_ids)
    return tuple(_said(item.drafts, tokens) if item.samples else () for item in scheduled)


def _said(drafts: tuple[int, ...], tokens: Iterator[int]) -> tuple[int, ...]:
    """Return an item's sampled tokens up to and including the first that differs from its draft.

    Later tokens were computed from a rejected draft token. Each accepted token equals the one sampled without drafts,
    since each position has its own random number.
    """
    sampled = tuple(islice(tokens, 1 + len(drafts)))
    num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, sampled, strict=False)))
    return sampled[: num_right + 1]


def _spread_logprobs(
    scheduled: Sequence[Scheduled], token_ids: Sequence[tuple[int, ...]], logprobs: Sequence[TokenLogprobs | None]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Group `logprobs` by scheduled item. Empty if no request wants log-probabilities."""
    if not logprobs:
        return ()
    sampled = iter(logprobs)
    entries = (islice(sampled, 1 + len(item.drafts)) if item.samples else () for item in scheduled)
    found = (tuple(of_item)[: len(tokens)] for of_item, tokens in zip(entries, token_ids, strict=True))
    return tuple(tuple(entry for entry in of_item if entry is not None) for of_item in found)


def logit_sums(logits: torch.Tensor) -> list[int]:
    """Return a checksum of each row: the bits of its numbers, summed as integers modulo 2^64."""
    bits = logits.view(torch.int32 if logits.dtype == torch.float32 else torch.int16)
    return [total % (1 << 64) for total in bits.sum(-1, dtype=torch.int64).tolist()]


def _spread_sums(
    scheduled: Sequence[Scheduled], token_ids: Sequence[tuple[int, ...]], sums: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Group `sums` by scheduled item, without those after a rejected draft token. Empty if no sums were computed."""
    if not sums:
        return ()
    rows = iter(sums)
    of_items = (tuple(islice(rows, 1 + len(item.drafts))) if item.samples else () for item in scheduled)
    return tuple(row[: len(tokens)] for row, tokens in zip(of_items, token_ids, strict=True))


class Landing:
    """Numbers that have arrived on the host or are on their way."""

    def __init__(self, numbers: Any, event: torch.cuda.Event | None = None, wait: Wait = synchronize) -> None:
        self._numbers = numbers
        self._event = event
        self._wait = wait

    def numbers(self) -> list[Any]:
        """Wait for the numbers and return them as Python objects. This is where a step waits for the device."""
        if self._event is not None:
            self._wait(self._event)
        landed: list[Any] = self._numbers.tolist()
        return landed


class ReadBack:
    """Copies one vector of int64 or float64 per step to pinned host memory, asynchronously.

    Two buffers alternate: the numbers of one step are read while those of the next arrive.
    """

    def __init__(self, device: torch.device, num_numbers: int, wait: Wait = synchronize) -> None:
        self._is_host = device.type == "cpu"
        self._wait = wait
        self._buffers = [] if self._is_host else [Pinned(num_numbers, wait) for _ in range(NUM_BUFFERS)]

    def start(self, vector: torch.Tensor) -> Landing:
        """Start copying `vector` to the host. The result of the call before the last must have been read."""
        if self._is_host:
            return Landing(vector)
        self._buffers.reverse()
        return Landing(*self._buffers[0].start(vector), self._wait)
