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

from kvscope_engine.model.joined.fuse import weights_bytes
from kvscope_engine.model.loading.ready_to_run import make_ready_to_run
from kvscope_engine.model.memory.step_memory import StepLimits, logits_width, step_buffer_bytes
from kvscope_engine.model.running.attention import PagedContext
from kvscope_engine.model.running.block_shares import BlockShares, ShareSchedule
from kvscope_engine.model.running.decode_graphs import DecodeGraphs, GraphShape
from kvscope_engine.model.running.forward import Forward
from kvscope_engine.model.running.host_memory import keep_freed_memory
from kvscope_engine.model.running.in_flight import InFlight, StepTimer
from kvscope_engine.model.running.kv_storage import KVStorage
from kvscope_engine.model.running.read_back import ReadBack
from kvscope_engine.model.running.step_buffer import StepBuffer
from kvscope_engine.model.running.step_inputs import StepInputs, TableRows, build_inputs, sampled_places
from kvscope_engine.model.running.step_tensors import StepTensors, put_inputs
from kvscope_engine.model.running.warm_up import warm_up
from kvscope_engine.model.sampling.sampler import Sampler
from kvscope_engine.policy.plan import StepPlan, StepResult
from kvscope_kernels import ops_for
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
        page_heat: int = 0,
        others: OtherRanks | None = None,
    ) -> None:
        self._others = others
        self._storage = storage
        self._device = loaded.device
        self._ops = ops_for(loaded.device.type)
        self._schedule = ShareSchedule(page_heat, self._ops)
        if loaded.device.type == "cpu":
            keep_freed_memory()
        self.fused = make_ready_to_run(loaded.module, loaded.quantization)
        self.weights_bytes = weights_bytes(loaded.module)
        self.notes: list[str] = []
        """What is not as it was asked for, a line each."""
        self._model = Forward(loaded.module)
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
                max_num_seqs=max_num_seqs,
                max_tokens=limits.max_request_tokens,
                block_size=storage.block_size,
            )

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[Progress], None]) -> None:
        """Compile every kernel that service can need and capture the graphs; on a CPU there is nothing to do."""
        if self._device.type == "cpu":
            return
        nothing = torch.full((1, 2), -1, dtype=torch.int64, device=self._device)
        self._ops.copy_rows(self._storage.rows, nothing)
        failure = warm_up(self._limits, self._warm_measuring, self._sampler, self._buffer, self._graphs, progress)
        torch.cuda.synchronize(self._device)
        if failure:
            self._graphs = None
            torch.cuda.empty_cache()
            self.notes.append(f"CUDA graphs could not be captured, steps run without them (slower): {failure}")

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
        shares = self._schedule.begin(inputs.num_single_token)
        shape = self._graphs.shape_of(inputs) if self._graphs is not None and shares is None else None
        buffer = self._buffer
        buffer.begin()
        if shape is not None and self._graphs is not None:
            tensors = self._graphs.put(inputs, shape)
        else:
            tensors = put_inputs(inputs, buffer)
        options = self._sampler.inputs(sampling, buffer, self._vocab_size, num_said)
        pairs = buffer.put(np.array(plan.copies, np.int64)) if plan.copies else None
        awaited = buffer.put(inputs.awaited) if inputs.awaited is not None else None
        buffer.send()
        if pairs is not None:
            self._ops.copy_rows(self._storage.rows, pairs)
        if awaited is not None and after is not None:
            tensors.input_ids.index_copy_(0, awaited[0], after.tokens.index_select(0, awaited[1]))
        timer = StepTimer(self._device)
        logits = self._forward(tensors, shape, len(sampling), shares)
        timer.stop()
        if self._others is not None:
            self._others.done()
        if logits is None:
            return InFlight(plan, timer, shares=shares)
        sampled = self._sampler.draw(logits, options)
        landing = self._read_back.start(sampled.packed)
        return InFlight(plan, timer, sampled, landing, shares, graph_size=shape.size if shape is not None else 0)

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
        self._graphs = None
        del self._model

    def _forward(
        self, tensors: StepTensors, shape: GraphShape | None, num_samples: int, shares: BlockShares | None
    ) -> torch.Tensor | None:
        """Logits of the sampled rows, (num_samples, vocabulary); None when nothing is sampled."""
        if shape is not None:
            assert self._graphs is not None, "a shape is one of a graph"
            return self._graphs.replay(shape, num_samples)
        if not num_samples:
            self._model.fill(tensors.input_ids, tensors.positions, self._context(tensors, shares))
            return None
        context = self._context(tensors, shares)
        return self._model.logits(tensors.input_ids, tensors.positions, context, tensors.sample_rows)

    def _run_eagerly(self, tensors: StepTensors) -> torch.Tensor:
        """Logits of all rows. A context of its own each time: what layers share is made in the graph that reads it."""
        return self._model.logits(tensors.input_ids, tensors.positions, self._context(tensors))

    def _warm_measuring(self, tensors: StepTensors) -> torch.Tensor:
        """The same, measured where service measures."""
        shares = self._schedule.any(tensors.num_single_token)
        return self._model.logits(tensors.input_ids, tensors.positions, self._context(tensors, shares))

    def _context(self, tensors: StepTensors, shares: BlockShares | None = None) -> PagedContext:
        decode, prefill, count = tensors.decode, tensors.prefill, tensors.num_single_token
        return PagedContext(self._storage, self._ops, tensors.slot_mapping, count, decode, prefill, shares=shares)
