"""Running a step: from the scheduler's plan to tokens.

Owns the device side of a step: inputs, the model's forward pass, sampling. Why a request runs, and what becomes of
its tokens, it must not know.

`launch` hands a whole step to the device and waits for nothing: one copy up, the forward pass, sampling, one copy
down. The next step may be launched before the last one's result is there. What it needs of it are tokens, and these
are taken on the device: rows whose token is in flight get it from the last step's samples. Everything runs on one
stream, in the order of launches, so that a step reads and writes blocks after all steps before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvscope_engine.model.fused.fuse import weights_bytes
from kvscope_engine.model.loading.ready_to_run import make_ready_to_run
from kvscope_engine.model.memory.step_memory import StepLimits, logits_width, step_buffer_bytes
from kvscope_engine.model.roofline.launches import Kind, Launches
from kvscope_engine.model.running.attention import KeptDecode, PagedContext
from kvscope_engine.model.running.attention_scores import AttentionScores, MeasuredSteps
from kvscope_engine.model.running.capture_failures import CaptureFailures
from kvscope_engine.model.running.decode_graphs import DecodeGraphs
from kvscope_engine.model.running.forward import Forward
from kvscope_engine.model.running.host_memory import keep_freed_memory
from kvscope_engine.model.running.in_flight import NOTHING, InFlight, Measures, StepTimer
from kvscope_engine.model.running.kv_storage import KVStorage
from kvscope_engine.model.running.pieces.mixed_graphs import MixedGraphs
from kvscope_engine.model.running.read_back import ReadBack
from kvscope_engine.model.running.step_buffer import StepBuffer
from kvscope_engine.model.running.step_inputs import StepInputs, TableRows, build_inputs, sampled_places
from kvscope_engine.model.running.step_tensors import StepTensors, put_inputs
from kvscope_engine.model.running.warm_up import warm_up
from kvscope_engine.model.sampling.sampler import Sampler
from kvscope_engine.model.sparse.page_choice import PageChoice
from kvscope_engine.model.sparse.skips import SKIP_STEPS, BlockSkips
from kvscope_engine.policy.plan import StepPlan, StepResult
from kvscope_kernels import Ops, ops_for
from kvscope_telemetry.messages.sampling_params import MAX_LOGPROBS
from kvscope_telemetry.messages.telemetry import Progress

if TYPE_CHECKING:
    from kvscope_engine.model.loading.loader import LoadedModel


class OtherRanks(Protocol):
    """Those that run each step with this one; see `ranks.leader`."""

    def tell(self, inputs: StepInputs, copies: Sequence[tuple[int, int]]) -> None:
        """The step that is run next."""

    def done(self) -> None:
        """Its layers were run here."""


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
    ) -> None:
        self._others = others
        self._storage = storage
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
        self._launches = Launches(loaded.device)
        self._vocab_size = logits_width(loaded)
        self._sampler = Sampler(loaded.eos_token_ids, loaded.info.vocab_size)
        limits = StepLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_request_tokens=min(loaded.max_model_len, storage.num_blocks * storage.block_size),
            block_size=storage.block_size,
        )
        self._limits = limits
        self._rows = TableRows(max_num_seqs, min(limits.max_request_blocks, storage.num_blocks))
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
                keeps_queries=page_heat > 0 and self.choice is None,
                is_by_length=self.choice is not None,
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
        """Compile every kernel that service can need and capture a graph; on a CPU there is nothing to do."""
        if self._device.type == "cpu":
            return
        nothing = torch.full((1, 2), -1, dtype=torch.int64, device=self._device)
        self._ops.copy_rows(self._storage.rows, nothing)
        failure = warm_up(self._limits, self._warm_measuring, self._sampler, self._buffer, self._graphs, progress)
        torch.cuda.synchronize(self._device)
        if failure:
            self._give_up_graphs(failure)

    def run(self, plan: StepPlan) -> StepResult:
        """One step: copy blocks, write and attend, sample what is to be sampled."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, after: InFlight | None = None) -> InFlight:
        """Hand a step to the device; nothing is waited for.

        `after` is the last step launched, where tokens that it samples are inputs of this one.
        """
        inputs = build_inputs(plan, self._rows, self._storage.block_size, after.rows() if after is not None else None)
        if self._others is not None:
            self._others.tell(inputs, plan.copies)
        sampling, num_said = sampled_places(plan.scheduled)
        measures = self._measures(self._measured.is_due(inputs.num_single_token))
        graphs, size = self._graphs_for(inputs) if measures.skips is None else (None, 0)
        buffer = self._buffer
        buffer.begin()
        tensors = put_inputs(inputs, buffer) if graphs is None else graphs.put(inputs, size)
        options = self._sampler.inputs(sampling, buffer, self._vocab_size, num_said)
        pairs = buffer.put(np.array(plan.copies, np.int64)) if plan.copies else None
        awaited = buffer.put(inputs.awaited) if inputs.awaited is not None else None
        buffer.send()
        if pairs is not None:
            self._ops.copy_rows(self._storage.rows, pairs)
        if awaited is not None and after is not None:
            tensors.input_ids.index_copy_(0, awaited[0], after.tokens.index_select(0, awaited[1]))
        timer = StepTimer(self._device)
        count = len(sampling)
        kind = self._kind(inputs, count, graphs, size, is_measured=measures != NOTHING)
        with self._launches.counted(kind):
            if graphs is None:
                logits = self._forward(tensors, count, measures)
            elif isinstance(graphs, MixedGraphs):
                logits = graphs.replay(size, count, measures.shares)
            else:
                logits = graphs.replay(size, count)
                if measures.shares is not None:
                    graphs.measure(size, inputs, tensors, measures.shares)
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
    def follow(self, inputs: StepInputs, copies: Sequence[tuple[int, int]]) -> None:
        """This rank's part of a step that rank 0 runs: all but the head and sampling."""
        self._buffer.begin()
        tensors = put_inputs(inputs, self._buffer)
        pairs = self._buffer.put(np.array(copies, np.int64)) if copies else None
        self._buffer.send()
        if pairs is not None:
            self._ops.copy_rows(self._storage.rows, pairs)
        self._model.fill(tensors.input_ids, tensors.positions, self._context(tensors))

    def recover(self) -> None:
        """After a step that ran out of memory: what it left is over, and memory that is only kept is given back."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Drop every tensor."""
        self._graphs = self._mixed = None
        del self._model

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

    def _forward(self, tensors: StepTensors, num_samples: int, measures: Measures) -> torch.Tensor | None:
        """Logits of the sampled rows, (num_samples, vocabulary); None when nothing is sampled."""
        if not num_samples:
            self._model.fill(tensors.input_ids, tensors.positions, self._context(tensors, measures))
            return None
        context = self._context(tensors, measures)
        return self._model.logits(tensors.input_ids, tensors.positions, context, tensors.sample_rows)

    def _run_eagerly(self, tensors: StepTensors, kept: list[KeptDecode] | None) -> torch.Tensor:
        """Logits of all rows. A context of its own each time: what layers share is made in the graph that reads it."""
        context = self._context(tensors)
        context.kept = kept
        return self._model.logits(tensors.input_ids, tensors.positions, context)

    def _warm_measuring(self, tensors: StepTensors) -> torch.Tensor:
        """The same, measured where service measures."""
        measures = self._measures(self._measured.any(tensors.num_single_token))
        return self._model.logits(tensors.input_ids, tensors.positions, self._context(tensors, measures))

    def _measures(self, is_due: bool) -> Measures:
        if not is_due:
            return NOTHING
        shares = AttentionScores(self._ops) if self._measures_shares else None
        return Measures(shares, BlockSkips() if self.choice is not None else None)

    def _context(self, tensors: StepTensors, measures: Measures = NOTHING) -> PagedContext:
        return PagedContext(
            *(self._storage, self._ops, tensors.slot_mapping, tensors.num_single_token),
            decode=tensors.decode,
            prefill=tensors.prefill,
            shares=measures.shares,
            choice=self.choice,
            skips=measures.skips,
        )
