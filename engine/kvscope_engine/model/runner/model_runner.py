"""Runs a step on the device: from the scheduler's plan to sampled tokens.

Owns the device side of a step: input tensors, the model's forward pass, sampling. Must not depend on scheduling or on
what happens to the tokens.

`ModelRunner.launch` enqueues a whole step on the device without waiting: one host-to-device copy, the forward pass,
sampling, one device-to-host copy. The next step may be launched before the previous result has arrived. Rows whose
input token is still in flight read it on the device from the previous step's samples. If a row's grammar or penalties
depend on such a token, sampling must wait until the token has arrived on the host: `launch` then ends with the logits,
and `InFlightStep.sample` enqueues the rest. Everything runs on one stream in launch order, so a step reads and writes
blocks after all steps before it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.batch_invariance.fixed_tiles import FixedTiles
from kvscope_engine.model.cuda_graphs.capture_failures import CaptureFailures
from kvscope_engine.model.cuda_graphs.decode_graphs import DecodeGraphs
from kvscope_engine.model.cuda_graphs.host_reads import HostReads
from kvscope_engine.model.cuda_graphs.piecewise.piecewise_graphs import PiecewiseGraphs
from kvscope_engine.model.cuda_graphs.shared_graphs import RankSync, SharedGraphs
from kvscope_engine.model.device_memory.read_back import RowReadBack, VectorReadBack, synchronize
from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.input_batch.step_inputs import StepInputs, TableRows, build_inputs, sampled_positions
from kvscope_engine.model.input_batch.step_limits import StepLimits
from kvscope_engine.model.input_batch.step_tensors import StepTensors, stage_inputs, table_width
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
from kvscope_engine.model.layers.sampling.sampler import Sampler
from kvscope_engine.model.layers.sampling.sampling_inputs import SamplingInputs
from kvscope_engine.model.layers.weight_bytes import weights_bytes
from kvscope_engine.model.platforms.host_allocator import keep_freed_memory
from kvscope_engine.model.runner.in_flight_step import (
    InFlightStep,
    PendingMeasurements,
    PendingSamples,
    StepExecution,
    StepTimer,
)
from kvscope_engine.model.runner.kernel_launches import Launches, PassKind
from kvscope_engine.model.runner.prompt_scoring import PendingScores, PromptRows, prompt_rows, score_prompts
from kvscope_engine.model.runner.runner_config import RunnerConfig
from kvscope_engine.model.runner.step_memory import logits_width, step_buffer_bytes
from kvscope_engine.model.runner.warm_up import idle_decodes, warm_up, warm_up_cpu
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import StepPlan, StepResult
from kvscope_kernels import Ops, ops_for
from kvscope_telemetry.messages.sampling_params import MAX_LOGPROBS
from kvscope_telemetry.messages.telemetry import Progress

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel


class OtherRanks(Protocol):
    """Sends each step to the other ranks of tensor parallelism. Implemented in `executor.leader`."""

    def send_step(
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
            num_sampled: Number of tokens sampled by the previous step that the other ranks must receive, by
                `broadcast_tokens`, before they run this step; 0 if this step needs none of them.
            graph_size: Size of the CUDA graph that all ranks replay; 0 if none.
        """

    def broadcast_tokens(self, tokens: torch.Tensor) -> None:
        """Broadcast the tokens sampled by the previous step, which are on the device."""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait until the device has reached `event`. Raises KvscopeError if a rank stopped responding."""

    def report_step_done(self) -> None: ...


class StepMeasurements(NamedTuple):
    """Accumulators for a step's measurements. A field is None if its quantity is not measured."""

    shares: AttentionScores | None = None
    skips: BlockSkips | None = None


NOT_MEASURED: Final = StepMeasurements()


class ModelRunner:
    """Runs steps on a model, its KV storage and a sampler. The constructor fuses the model's layers.

    Raises BadInput for a model whose attention is not supported. On a GPU, call `warm_up` before the first request.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        storage: KVStorage,
        config: RunnerConfig,
        *,
        states: StateStorage | None = None,
        lora: LoraAdapters | LoraSlots | None = None,
        ops: Ops | None = None,
        others: OtherRanks | None = None,
        notes: list[str] | None = None,
    ) -> None:
        """Prepare `loaded` and allocate the buffers of a step.

        Args:
            loaded: The model, whose layers are fused in place.
            storage: KV cache of the attention layers.
            config: Options of the runner.
            states: States of recurrent layers, if the model has any.
            lora: LoRA adapters; on a rank that follows, only their slots, which rank 0 fills.
            ops: Attention and other operations; by default those of the device.
            others: The other ranks of tensor parallelism, if this runner leads them.
            notes: List to use as the attribute `notes`; by default a new one.
        """
        self._others = others
        self._lora = lora if isinstance(lora, LoraAdapters) else None
        self._lora_slots = lora.slots if isinstance(lora, LoraAdapters) else lora
        self._storage = storage
        self._states = states
        assert (states is not None) == bool(states_of(loaded.module)), "recurrent layers need states"
        self._device = loaded.device
        self._ops = ops or ops_for(loaded.device.type)
        self._measures_shares = config.page_heat > 0
        self.choice: PageChoice | None = None
        """Chooses the blocks that decodes attend to (sparse attention); None if they attend to all blocks."""
        if config.sparse_decode is not None:
            self.choice = PageChoice(config.sparse_decode, storage.block_size, self._ops, storage.bounds_tokens)
        self._measured = MeasuredSteps(config.page_heat or (SKIP_STEPS if self.choice is not None else 0))
        if loaded.device.type == "cpu":
            keep_freed_memory()
        self.fused = make_ready_to_run(loaded.module, loaded.quantization)
        self.weights_bytes = weights_bytes(loaded.module)
        self.notes: list[str] = [] if notes is None else notes
        """Messages about options that could not be applied as requested, in the order of discovery. Other
        components may append to it.
        """
        self._module = loaded.module
        self._model = Forward(loaded.module)
        self._tiles: FixedTiles | None = None
        if config.tile_sizes:
            size, *other_sizes = config.tile_sizes
            self._tiles = FixedTiles(self._model, storage, self._ops, size, other_sizes)
        self._sums_logits = config.fingerprints
        self._is_own = own_forward(loaded.module) is not None
        self._launches = Launches(loaded.device)
        self._vocab_size = logits_width(loaded)
        self._sampler = Sampler(loaded.eos_token_ids, loaded.info.vocab_size, self._ops)
        self._limits = limits = _step_limits(loaded, storage, config)
        max_blocks = min(limits.max_request_blocks, storage.num_blocks)
        self._rows = TableRows(limits.max_num_seqs, max_blocks, storage.num_groups)
        self._buffer = StepBuffer(loaded.device, step_buffer_bytes(limits, self._vocab_size))
        self._wait = synchronize if others is None else others.wait_for
        self._read_back = VectorReadBack(loaded.device, limits.max_num_seqs * (2 + 2 * MAX_LOGPROBS), self._wait)
        table_blocks = table_width(limits.max_request_tokens, storage.block_size)
        num_shares = limits.max_num_seqs * table_blocks * storage.num_groups
        self._shares_back, self._skips_back = (RowReadBack(loaded.device, num_shares, self._wait) for _ in range(2))
        self._copies_made: deque[tuple[tuple[int, int], ...]] = deque(maxlen=2)
        """Block copies of the last two plans, by which a failed step that is run again is recognized.

        The copies of such a step are not repeated, because their source blocks may belong to other requests by then.
        """
        self._graphs = self._make_decode_graphs(config)
        self._piecewise_graphs = self._make_piecewise_graphs(config)
        self._shared_graphs: SharedGraphs | None = None
        """CUDA graphs shared by several ranks; None with a single rank or without graphs."""
        if config.shares_graphs and self._graphs is not None:
            self._shared_graphs = SharedGraphs(self._graphs)

    def _make_decode_graphs(self, config: RunnerConfig) -> DecodeGraphs | None:
        if self._device.type != "cuda" or config.enforce_eager:
            return None
        if config.shares_graphs and self.choice is not None:  # each rank would choose its own graph length
            return None
        return DecodeGraphs(
            self._eager_logits,
            self._buffer,
            self._limits,
            measures_attention=self._measures_shares and self.choice is None,
            is_by_length=self.choice is not None,
            pad_state=self._states.pad_slot if self._states is not None else None,
            failures=CaptureFailures(self.notes.append),
        )

    def _make_piecewise_graphs(self, config: RunnerConfig) -> PiecewiseGraphs | None:
        if self._graphs is None or not config.piecewise_graphs:
            return None
        return PiecewiseGraphs(
            self._model,
            self._storage,
            self._ops,
            self._buffer,
            max_num_batched_tokens=config.max_num_batched_tokens,
            failures=CaptureFailures(self.notes.append),
        )

    @property
    def why_no_prompt_logprobs(self) -> str:
        """Reason why requests with `prompt_logprobs` cannot run; "" if they can."""
        if self._tiles is not None:
            return "with --deterministic, only the logits of sampled tokens are computed"
        if self._is_own:
            return "this model runs its own forward code, which returns only the logits of sampled tokens"
        return ""

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[Progress], None]) -> None:
        """Run what the first requests would otherwise wait for: on a GPU, compile every kernel that steps can need and
        capture CUDA graphs; on a CPU, run two small steps. No step writes to the KV cache.
        """
        if self._device.type == "cpu":
            has_steps = self._states is None and not self._is_own
            run = self._warm_up_logits if has_steps else None
            warm_up_cpu(self._limits, run, self._sampler, self._buffer, self._vocab_size)
            return
        idle_pairs = torch.full((1, 2), -1, dtype=torch.int64, device=self._device)
        if self._storage.layers:
            self._ops.copy_rows(self._storage.rows, idle_pairs)
        if self._states is not None:
            self._ops.copy_rows(self._states.rows, idle_pairs)
        if self._graphs is not None and not self._is_own and (reads := self._host_reads()):
            self._disable_graphs(reads)
        graphs = (self._graphs, self._piecewise_graphs) if self._shared_graphs is None else (None, None)
        failure = warm_up(self._limits, self._warm_up_logits, self._sampler, self._buffer, *graphs, progress)
        torch.cuda.synchronize(self._device)
        if failure:
            self._disable_graphs(failure)

    @property
    def captures_shared_graphs(self) -> bool:
        """Whether this rank has CUDA graphs that all ranks must capture together, by `capture_shared_graphs`."""
        return self._shared_graphs is not None and not self._shared_graphs.is_refused

    @torch.inference_mode()
    def capture_shared_graphs(self, rank_sync: RankSync) -> None:
        """Capture CUDA graphs on all ranks together, after the all-reduces are installed and before the first
        request."""
        assert self._shared_graphs is not None, "there are graphs of several ranks"
        self.notes += self._shared_graphs.capture_all(rank_sync)
        torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def do_idle_work(self) -> bool:
        """Capture at most one pending CUDA graph, while no request is waiting and no step is in flight.

        Returns whether more work remains.
        """
        if self._shared_graphs is not None:
            return False
        all_graphs = [graphs for graphs in (self._graphs, self._piecewise_graphs) if graphs is not None]
        any(graphs.capture_pending() for graphs in all_graphs)  # one size at most
        return any(graphs.is_waiting for graphs in all_graphs)

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, after: InFlightStep | None = None) -> InFlightStep:
        """Enqueue a step on the device without waiting for anything.

        `after` is the step launched before this one, if that step has not been committed yet.
        """
        if self._states is not None:  # first: states of waiting requests must survive a failed step
            self._states.copy(plan.state_copies, self._ops.copy_rows)
        inputs = build_inputs(plan, self._rows, self._storage.block_size, after.rows() if after is not None else None)
        lora_rows = self._lora.rows_of(plan.scheduled) if self._lora is not None else None
        requests, num_output_tokens = sampled_positions(plan.scheduled)
        measures = self._measures(is_due=self._measured.is_due(inputs.num_single_token))
        copies = () if any(plan.copies is previous_copies for previous_copies in self._copies_made) else plan.copies
        prompts = prompt_rows(plan.scheduled)
        needs_eager = measures.skips is not None or lora_rows is not None or prompts is not None
        graphs, size = (None, 0) if needs_eager else self._graphs_for(inputs, measures)
        if self._others is not None:
            num_sampled = len(after.tokens) if after is not None and inputs.awaited is not None else 0
            self._others.send_step(
                inputs, copies, lora_rows.slots if lora_rows is not None else None, num_sampled, size
            )
        buffer = self._buffer
        buffer.begin()
        tensors = stage_inputs(inputs, buffer) if graphs is None else graphs.stage(inputs, size)
        is_late = after is not None and _depend_on_awaited_tokens(requests, num_output_tokens)
        options = None if is_late else self._sampler.inputs(requests, buffer, self._vocab_size, num_output_tokens)
        pairs = buffer.put(np.array(copies, np.int64)) if copies else None
        state_saves = buffer.put(_state_saves(plan)) if plan.state_saves and graphs is not None else None
        awaited = buffer.put(inputs.awaited) if inputs.awaited is not None else None
        slots = buffer.put(lora_rows.slots) if lora_rows is not None else None
        buffer.send()
        if pairs is not None and self._storage.layers:
            self._ops.copy_rows(self._storage.rows, pairs)
            self._copies_made.append(copies)
        if awaited is not None and after is not None:
            if self._others is not None:
                self._others.broadcast_tokens(after.tokens)
            tensors.input_ids.index_copy_(0, awaited[0], after.tokens.index_select(0, awaited[1]))
        timer = StepTimer(self._device, self._wait)
        states = _state_batch(plan, self._states) if self._states is not None and graphs is None else None
        own = own_batch(inputs) if self._is_own else None
        count = len(requests)
        kind = self._launch_kind(inputs, count, graphs, size, is_measured=measures != NOT_MEASURED)
        scores: PendingScores | None = None
        with self._launches.counted(kind):
            if self._tiles is not None:
                logits = self._tiles.logits(inputs)
            elif graphs is None:
                with self._lora_applied(lora_rows, slots):
                    logits, scores = self._forward(tensors, count, measures, states, own, prompts)
            elif isinstance(graphs, PiecewiseGraphs):
                logits = graphs.replay(size, count, measures.shares)
            else:
                logits = graphs.replay(count)
                if self._states is not None and state_saves is not None:
                    self._ops.copy_rows(self._states.rows, state_saves)
        timer.stop()
        measurements = self._start_read_back(measures, graphs, inputs)
        if self._others is not None:
            self._others.report_step_done()
        execution = StepExecution(
            timer=timer,
            measurements=measurements,
            launches=self._launches.num_launches(kind),
            graph_size=graphs.num_requests if isinstance(graphs, DecodeGraphs) else 0,
            graph_tokens=size if isinstance(graphs, PiecewiseGraphs) else 0,
            logit_sums=logit_sums(logits) if self._sums_logits and logits is not None else (),  # before sampling
            scores=scores,
        )
        if logits is None:
            return InFlightStep(plan, execution)
        if options is None:
            sample_later = partial(self._sample_later, logits, requests, num_output_tokens)
            return InFlightStep(plan, execution, sample_later=sample_later)
        return InFlightStep(plan, execution, self._sample(logits, options))

    @torch.inference_mode()
    def run_as_follower(
        self,
        inputs: StepInputs,
        copies: Sequence[tuple[int, int]],
        lora_slots: NDArray[np.int64] | None = None,
        sampled: torch.Tensor | None = None,
        graph_size: int = 0,
    ) -> None:
        """Run this rank's part of a step that rank 0 leads: no sampling, and the LM head only if a graph contains it.

        `sampled`: tokens of the previous step, if this step awaits any.
        """
        self._buffer.begin()
        graphs = self._graphs if graph_size else None
        tensors = stage_inputs(inputs, self._buffer) if graphs is None else graphs.stage(inputs, graph_size)
        pairs = self._buffer.put(np.array(copies, np.int64)) if copies else None
        slots = self._buffer.put(lora_slots) if lora_slots is not None else None
        awaited = self._buffer.put(inputs.awaited) if inputs.awaited is not None else None
        self._buffer.send()
        if pairs is not None:
            self._ops.copy_rows(self._storage.rows, pairs)
        if awaited is not None and sampled is not None:
            tensors.input_ids.index_copy_(0, awaited[0], sampled.index_select(0, awaited[1]))
        if graphs is not None:
            graphs.replay(inputs.num_tokens)
            return
        with self._lora_applied(StepRows(lora_slots) if lora_slots is not None else None, slots):
            self._model.fill(tensors.input_ids, tensors.positions, self._context(tensors))

    @torch.inference_mode()
    def is_device_usable(self) -> bool:
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
        """Wait until the device is idle after a failed step, and free cached memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def release_graphs(self) -> bool:
        """Free the memory of all CUDA graphs, which are captured again later. Returns whether there were any.

        Graphs that several ranks run together are not freed.
        """
        if self._shared_graphs is not None:
            return False
        released = [graphs.release() for graphs in (self._graphs, self._piecewise_graphs) if graphs is not None]
        if any(released):
            self.notes.append("a step failed twice: CUDA graphs and their memory were given back, to be captured later")
            self.recover()
        return any(released)

    @property
    def has_graphs(self) -> bool:
        """Whether there are CUDA graphs, captured or pending, that `release_graphs` can free."""
        return self._graphs is not None and self._shared_graphs is None

    def keep_graphs(self, *, of_decodes: bool, of_prefills: bool) -> None:
        """Free the CUDA graphs of decodes unless `of_decodes`, and those of steps with prefills unless `of_prefills`,
        to save memory.

        Freed graphs are not captured again until a call of this method includes their kind. No step may be in flight.
        Does nothing with several ranks.
        """
        if self._shared_graphs is not None:
            return
        for graphs, is_kept in ((self._graphs, of_decodes), (self._piecewise_graphs, of_prefills)):
            if graphs is not None:
                graphs.failures.set_suspended(not is_kept)
                if not is_kept and graphs.release():
                    self.recover()

    def close(self) -> None:
        self._graphs = self._piecewise_graphs = self._shared_graphs = self._tiles = None
        del self._model, self._module

    def _sample(self, logits: torch.Tensor, options: SamplingInputs) -> PendingSamples:
        sampled = self._sampler.draw(logits, options)
        return PendingSamples(sampled, self._read_back.start(sampled.packed))

    @torch.inference_mode()
    def _sample_later(
        self, logits: torch.Tensor, requests: list[Request], num_output_tokens: list[int]
    ) -> PendingSamples:
        """Sample in a step whose sampling inputs were not known at launch; they need a separate host-to-device copy."""
        self._buffer.begin()
        options = self._sampler.inputs(requests, self._buffer, self._vocab_size, num_output_tokens)
        self._buffer.send()
        return self._sample(logits, options)

    def _lora_applied(self, rows: StepRows | None, slots: torch.Tensor | None) -> AbstractContextManager[None]:
        if self._lora_slots is None or rows is None or slots is None:
            return nullcontext()
        return self._lora_slots.applied(rows, slots)

    def _launch_kind(
        self,
        inputs: StepInputs,
        count: int,
        graphs: DecodeGraphs | PiecewiseGraphs | None,
        size: int,
        *,
        is_measured: bool,
    ) -> PassKind | None:
        pieces = graphs.num_graphs(size) if isinstance(graphs, PiecewiseGraphs) else int(graphs is not None)
        in_graph = isinstance(graphs, DecodeGraphs)
        return self._launches.pass_kind(inputs, count, in_graph=in_graph, num_pieces=pieces, is_measured=is_measured)

    def _graphs_for(
        self, inputs: StepInputs, measures: StepMeasurements
    ) -> tuple[DecodeGraphs | PiecewiseGraphs | None, int]:
        """Return the graphs and the graph size that run a step, or (None, 0) if it runs eagerly.

        Captures graphs that were released. Decode graphs do not run drafted steps whose attention is measured: in a
        graph, the attention of drafted requests is not separate from that of the decodes.
        """
        if self._shared_graphs is not None:
            shared = self._shared_graphs.size_of(inputs)
            return (None, 0) if shared is None else (self._graphs, shared)
        needs_eager_scores = inputs.is_drafted and measures.shares is not None
        if self._graphs is not None and not needs_eager_scores and (size := self._graphs.size_of(inputs)) is not None:
            return self._graphs, size
        if self._piecewise_graphs is not None and (size := self._piecewise_graphs.size_of(inputs)) is not None:
            return self._piecewise_graphs, size
        return None, 0

    def _host_reads(self) -> str:
        """Run a warm-up decode and describe an operation in it that no CUDA graph can contain; empty if there
        is none.
        """
        self._buffer.begin()
        tensors = idle_decodes(self._limits, self._buffer)
        self._buffer.send()
        with HostReads(self._module, self._device) as reads:
            self._eager_logits(tensors, None)
        return reads.description

    def _disable_graphs(self, failure: str) -> None:
        self._graphs = self._piecewise_graphs = None
        if self._shared_graphs is not None:  # other ranks may capture and must learn that this one does not
            self._shared_graphs.refuse(failure)
        self.notes.append(f"CUDA graphs could not be captured, steps run without them (slower): {failure}")

    def _forward(
        self,
        tensors: StepTensors,
        num_samples: int,
        measures: StepMeasurements,
        states: StateBatch | None,
        own: OwnBatch | None,
        prompts: PromptRows | None,
    ) -> tuple[torch.Tensor | None, PendingScores | None]:
        """Run the model without graphs.

        Returns the logits of the sampled rows, (num_samples, vocabulary), or None if nothing is sampled, and the scores
        of `prompts`.
        """
        ids, positions, context = tensors.input_ids, tensors.positions, self._context(tensors, measures, states, own)
        if prompts is not None:
            hidden = self._model.hidden(ids, positions, context)
            scores = score_prompts(self._model, hidden, prompts, self._vocab_size)
            if not num_samples or tensors.sample_rows is None:
                return None, scores
            return self._model.logits_of(hidden, tensors.sample_rows), scores
        if not num_samples:
            self._model.fill(ids, positions, context)
            return None, None
        return self._model.logits(ids, positions, context, tensors.sample_rows), None

    def _start_read_back(
        self, measures: StepMeasurements, graphs: DecodeGraphs | PiecewiseGraphs | None, inputs: StepInputs
    ) -> PendingMeasurements:
        """Start copying measurements to the host. Call it before the copy of the tokens is enqueued."""
        shares, skips = measures
        return PendingMeasurements(
            None
            if shares is None
            else graphs.start_score_copy(inputs, self._shares_back)
            if isinstance(graphs, DecodeGraphs)
            else shares.start(self._shares_back),
            None if skips is None else skips.start(self._skips_back),
        )

    def _eager_logits(self, tensors: StepTensors, shares: AttentionScores | None) -> torch.Tensor:
        """Return the logits of all rows, computed with a new attention context.

        The context is not reused, because tensors that the layers share must be created within the CUDA graph that is
        being captured.
        """
        states = None
        if self._states is not None and tensors.state_slots is not None:
            states = StateDecodes(self._states, tensors.state_slots)
        context = self._context(tensors, StepMeasurements(shares), states)
        return self._model.logits(tensors.input_ids, tensors.positions, context)

    def _warm_up_logits(self, tensors: StepTensors) -> torch.Tensor:
        """Return the logits of all rows of a warm-up step. A step of a kind whose attention is measured in service runs
        twice, once with measurement.

        A model that runs its own forward code is not run, and the logits are zeros, because its kernels are unknown. If
        steps run in fixed tiles, an idle tile is run instead of the step.
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

    def _measures(self, *, is_due: bool) -> StepMeasurements:
        if not is_due:
            return NOT_MEASURED
        shares = AttentionScores() if self._measures_shares else None
        return StepMeasurements(shares, BlockSkips() if self.choice is not None else None)

    def _context(
        self,
        tensors: StepTensors,
        measures: StepMeasurements = NOT_MEASURED,
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


def _step_limits(loaded: LoadedModel, storage: KVStorage, config: RunnerConfig) -> StepLimits:
    return StepLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_request_tokens=min(loaded.max_model_len, storage.num_blocks * storage.block_size),
        block_size=storage.block_size,
        num_groups=storage.num_groups,
        has_experts=any(isinstance(submodule, FusedExperts) for submodule in loaded.module.modules()),
        max_drafts=config.max_drafts,
    )


def _depend_on_awaited_tokens(requests: Sequence[Request], num_output_tokens: Sequence[int]) -> bool:
    """Whether sampling of any row depends, by its grammar or penalties, on a token that is still in flight."""
    return any(
        count > len(request.output_token_ids) and request.depends_on_tokens
        for request, count in zip(requests, num_output_tokens, strict=True)
    )


def own_batch(inputs: StepInputs) -> OwnBatch:
    return OwnBatch(inputs.query_start.tolist(), inputs.seq_lens.tolist(), inputs.sample_rows.tolist())


def _state_saves(plan: StepPlan) -> NDArray[np.int64]:
    """Return (source slot, target slot) pairs, shape (n, 2), of the recurrent states that a decode step saves.

    Each pair saves the state after its request's token.
    """
    return np.array([(save.request.state_slot, save.slot) for save in plan.state_saves], np.int64)


def _state_batch(plan: StepPlan, storage: StateStorage) -> StateBatch:
    starts = [0, *accumulate(item.num_tokens for item in plan.scheduled)]
    sequence_of_request = {item.request.number: sequence for sequence, item in enumerate(plan.scheduled)}
    saves: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for save in plan.state_saves:
        sequence = sequence_of_request[save.request.number]
        row = starts[sequence] + save.num_tokens - plan.scheduled[sequence].start
        saves[sequence].append((row, save.slot))
    slots = [item.request.state_slot for item in plan.scheduled]
    has_initial_state = [item.start > 0 for item in plan.scheduled]
    in_prompt = [item.start < item.request.num_prompt_tokens for item in plan.scheduled]
    return StateBatch(storage, slots, has_initial_state, starts, saves, in_prompt)


def logit_sums(logits: torch.Tensor) -> list[int]:
    """Return a checksum of each row of logits: the bits of its numbers, summed as integers modulo 2^64."""
    bits = logits.view(torch.int32 if logits.dtype == torch.float32 else torch.int16)
    return [total % (1 << 64) for total in bits.sum(-1, dtype=torch.int64).tolist()]
