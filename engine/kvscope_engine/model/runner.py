"""Running a step: from the scheduler's plan to tokens.

Owns the device side of a step: inputs, the model's forward pass, sampling. Why a request runs, and what becomes of
its tokens, it must not know.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.attention import DecodeBatch, PagedContext, PrefillBatch
from kvscope_engine.model.decode_graphs import DecodeGraphs
from kvscope_engine.model.float32_head import use_float32_logits
from kvscope_engine.model.forward import Forward
from kvscope_engine.model.fuse import fuse_model, weights_bytes
from kvscope_engine.model.hook_check import check_hook
from kvscope_engine.model.host_memory import keep_freed_memory
from kvscope_engine.model.kv_storage import KVStorage
from kvscope_engine.model.sampler import Sampler
from kvscope_engine.model.step_inputs import StepInputs, TableRows, build_inputs
from kvscope_engine.policy.plan import Scheduled, StepPlan, StepResult
from kvscope_kernels import ops_for
from kvscope_telemetry.commands import TokenLogprobs

if TYPE_CHECKING:
    from kvscope_engine.model.loader import LoadedModel


class ModelRunner:
    """A model, its KV storage and the sampler, ready to run steps. Prepares the model when made (fuses, captures).

    Raises BadInput for a model whose attention cannot be served.
    """

    def __init__(
        self, loaded: LoadedModel, storage: KVStorage, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._storage = storage
        self._device = loaded.device
        self._ops = ops_for(loaded.device.type)
        if loaded.device.type == "cpu":
            keep_freed_memory()
        check_hook(loaded.module)
        use_float32_logits(loaded.module)
        self.fused = fuse_model(loaded.module)
        self.weights_bytes = weights_bytes(loaded.module)
        self._model = Forward(loaded.module)
        self._sampler = Sampler(loaded.eos_token_ids, loaded.info.vocab_size)
        max_blocks = -(-loaded.max_model_len // storage.block_size)
        self._rows = TableRows(max_num_seqs, min(max_blocks, storage.num_blocks))
        self._graphs = self._capture(max_num_seqs, max_blocks, loaded.max_model_len)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One step: copy blocks, write and attend, sample what is to be sampled."""
        self._storage.copy_blocks(plan.copies)
        inputs = build_inputs(plan, self._rows, self._storage.block_size)
        timer = _Timer(self._device)
        logits = self._forward(inputs)
        timer.stop()
        sampled = [item for item in plan.scheduled if item.samples]
        if logits is None:
            return StepResult((None,) * len(plan.scheduled), forward_ns=timer.elapsed_ns())
        token_ids, logprobs = self._sampler.sample(logits, [item.request for item in sampled])
        return StepResult(
            token_ids=_spread(plan.scheduled, token_ids),
            logprobs=_spread_logprobs(plan.scheduled, logprobs),
            forward_ns=timer.elapsed_ns(),
        )

    def close(self) -> None:
        """Drop every tensor."""
        self._graphs = None
        del self._model

    def _forward(self, inputs: StepInputs) -> torch.Tensor | None:
        """Logits of the sampled rows, (num_samples, vocabulary); None when nothing is sampled."""
        keeps_all = len(inputs.sample_rows) == inputs.num_tokens
        if self._graphs is not None and keeps_all and inputs.num_decodes == inputs.num_tokens:
            logits = self._graphs.run(inputs)
            if logits is not None:
                return logits
        ids, positions = self._to_device(inputs.input_ids), self._to_device(inputs.positions)
        context = self._context(inputs)
        if not len(inputs.sample_rows):
            self._model.fill(ids, positions, context)
            return None
        rows = None if keeps_all else self._to_device(inputs.sample_rows)
        return self._model.logits(ids, positions, context, rows)

    def _context(self, inputs: StepInputs) -> PagedContext:
        """Tensors of a step, its decodes and its prefills apart."""
        count = inputs.num_decodes
        tables, seq_lens = self._to_device(inputs.block_tables), self._to_device(inputs.seq_lens)
        decode = prefill = None
        if count:
            decode = DecodeBatch(tables[:count], seq_lens[:count], int(inputs.seq_lens[:count].max()))
        if count < len(inputs.seq_lens):
            query_start = inputs.query_start[count:] - inputs.query_start[count]
            prefill = PrefillBatch(
                block_tables=tables[count:],
                seq_lens=seq_lens[count:],
                max_seq_len=int(inputs.seq_lens[count:].max()),
                query_start=self._to_device(query_start),
                max_query_len=int(np.diff(query_start).max()),
            )
        slots = self._to_device(inputs.slot_mapping)
        return PagedContext(self._storage, self._ops, slots, count, decode, prefill)

    def _capture(self, max_num_seqs: int, max_blocks: int, max_model_len: int) -> DecodeGraphs | None:
        if self._device.type != "cuda":
            return None
        with torch.inference_mode():
            return DecodeGraphs(
                self._model.logits,
                lambda slots, decode: PagedContext(self._storage, self._ops, slots, len(decode.seq_lens), decode, None),
                max_num_seqs=max_num_seqs,
                max_blocks=max_blocks,
                max_model_len=max_model_len,
                device=self._device,
            )

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


class _Timer:
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


def _spread(scheduled: Sequence[Scheduled], token_ids: Sequence[int]) -> tuple[int | None, ...]:
    tokens = iter(token_ids)
    return tuple(next(tokens) if item.samples else None for item in scheduled)


def _spread_logprobs(
    scheduled: Sequence[Scheduled], logprobs: Sequence[TokenLogprobs | None]
) -> tuple[TokenLogprobs | None, ...]:
    """Empty stays empty: nobody asked."""
    if not logprobs:
        return ()
    sampled = iter(logprobs)
    return tuple(next(sampled) if item.samples else None for item in scheduled)
