"""Piecewise CUDA graphs of steps with prefills, one per padded number of tokens.

Owns the graphs of all sizes and their shared buffers. All are captured before the first request, so that no request
waits for a capture; the largest comes first, and the others reuse its memory. Steps of a size that could not be
captured use the next larger one. A capture that failed for lack of memory is retried while the engine is idle.

A step is padded with tokens that write to slot -1 and attend to nothing. Attention runs eagerly, since its launches
depend on the step's lengths, and so does the head, since it runs only on the sampled rows. Larger steps run eagerly: in
them, a launch keeps the device busy for longer than the host takes to issue it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from kvscope_engine.model.cuda_graphs.capture_failures import CaptureFailures, is_refusal, try_capture, try_each_key
from kvscope_engine.model.cuda_graphs.piecewise.piece_recorder import (
    Attend,
    Crossings,
    CutContext,
    GraphSequence,
    PieceRecorder,
)
from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.input_batch.step_tensors import StepTensors, stage_inputs, stage_padded
from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.layers.attention.attention_scores import AttentionScores
from kvscope_engine.model.layers.attention.paged_attention import PagedContext
from kvscope_engine.model.layers.forward import Forward
from kvscope_kernels import Ops

SIZES: Final = (16, 32, 64, 128, 256, 512)
"""Token counts of captured graphs, ascending. Steps with fewer tokens are padded to the first size; a smaller
graph would not be faster, because a matmul computes whole tiles of rows.
"""


def piecewise_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    largest = min(max_num_batched_tokens, SIZES[-1])
    return (*(size for size in SIZES if size < largest), largest)


def _describe_size(size: int) -> str:
    return f"steps with prefills of {size} tokens"


@dataclass(frozen=True, slots=True)
class _Captured:
    sequence: GraphSequence
    hidden: torch.Tensor
    """Output of the last piece, (size, hidden)."""
    input_ids: torch.Tensor


class PiecewiseGraphs:
    """Captures and replays CUDA graphs of steps with prefills.

    For each step, call `size_of`, then the buffer's `begin`, `stage` (before anything else is put into the buffer), the
    buffer's `send`, and `replay`.
    """

    def __init__(
        self,
        forward: Forward,
        storage: KVStorage,
        ops: Ops,
        buffer: StepBuffer,
        *,
        max_num_batched_tokens: int,
        failures: CaptureFailures | None = None,
    ) -> None:
        self.sizes = piecewise_sizes(max_num_batched_tokens)
        self._forward = forward
        self._storage = storage
        self._ops = ops
        self._buffer = buffer
        self._crossings = Crossings(self.sizes[-1])
        self._captured: dict[int, _Captured] = {}
        self.failures = failures or CaptureFailures(lambda note: None)
        self._pool: Any = None
        self._stream: Any = None
        self._step: tuple[StepTensors, int] | None = None

    def size_of(self, inputs: StepInputs) -> int | None:
        """Return the smallest captured size for a step with prefills; None if there is none."""
        if inputs.num_single_token == inputs.num_tokens:
            return None
        return next((size for size in self.sizes if size >= inputs.num_tokens and size in self._captured), None)

    def capture_all(self) -> None:
        """Capture all sizes before the first request. Sizes that fail are left out and reported."""
        errors = try_each_key(self.sizes[::-1], self._try_capture)
        if len(errors) == len(self.sizes):  # the model cannot be split, for example: report it once
            largest = self.sizes[-1]
            is_permanent = is_refusal(errors[largest])
            for size in self.sizes[:-1]:
                self.failures.record(size, errors[size], is_permanent=is_permanent)
            self.failures.record_and_report(largest, "steps with prefills", errors[largest], is_permanent=is_permanent)
            return
        for size, error in errors.items():
            self._report_failure(size, error)

    def capture_pending(self) -> bool:
        """Capture the largest size that failed or was released, if its pause is over. Call it while the engine is idle.

        Returns whether there was one.
        """
        for size in reversed(self.sizes):
            if size not in self._captured and self.failures.may_try(size):
                error = self._try_capture(size)
                if error is not None:
                    self._report_failure(size, error)
                else:
                    self.failures.record_capture(size, _describe_size(size))
                return True
        return False

    @property
    def is_waiting(self) -> bool:
        """Whether `capture_pending` has something to capture, now or after a pause."""
        return self.failures.is_waiting

    def release(self) -> bool:
        """Release all graphs and the memory that they share. Returns whether there were any."""
        for size in self._captured:
            self.failures.defer(size)
        had_any = bool(self._captured)
        self._captured.clear()
        self._pool = self._stream = None
        return had_any

    def _try_capture(self, size: int) -> Exception | None:
        # All exceptions are accepted: a model called in two parts may raise anything.
        error = try_capture(partial(self._capture, size), lambda _: True)
        if error is not None and (not self._captured or is_refusal(error)):
            # Without graphs the pool no longer exists; after a refusal its memory is never released.
            self._pool = self._stream = None
        return error

    def _report_failure(self, size: int, error: Exception) -> None:
        self.failures.record_and_report(size, _describe_size(size), error)

    def _capture(self, size: int) -> None:
        """Capture one size. Waits for all work enqueued on the device, and uses the input buffer.

        Raises what CUDA or the model raise.
        """
        self._buffer.begin()
        ids, positions, slots = stage_padded(None, size, self._buffer, self._storage.num_groups)
        self._buffer.send()
        hidden_rows: list[torch.Tensor] = []

        def run(attend: Attend) -> None:
            context = CutContext(self._storage, self._ops, slots, 0, None, None, attend_function=attend)
            hidden = self._forward.hidden(ids, positions, context)
            hidden_rows[:] = [self._crossings.rows("hidden", hidden)]
            hidden_rows[0].copy_(hidden)

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        sequence = PieceRecorder(self._crossings, self._pool, self._stream).record(run)
        self._captured[size] = _Captured(sequence, hidden_rows[0], ids)

    def num_graphs(self, size: int) -> int:
        """Return the number of graphs that a step of `size` tokens replays."""
        return len(self._captured[size].sequence.graphs)

    def stage(self, inputs: StepInputs, size: int) -> StepTensors:
        """Write a step into the buffer where its graphs read it. Must be the first data written after the buffer's
        `begin`.
        """
        tensors = stage_inputs(inputs, self._buffer, size)
        captured = self._captured[size].input_ids
        assert tensors.input_ids.data_ptr() == captured.data_ptr(), "graphs read fixed addresses"
        self._step = tensors, inputs.num_tokens
        return tensors

    def replay(self, size: int, num_rows: int, shares: AttentionScores | None = None) -> torch.Tensor | None:
        """Run the step that was staged. Returns logits (num_rows, vocabulary), or None if `num_rows` is 0.

        `shares` accumulates attention per block, if it is measured.
        """
        assert self._step is not None, "nothing was staged"
        (tensors, num_tokens), self._step = self._step, None
        captured = self._captured[size]
        count, decode, prefill = tensors.num_single_token, tensors.decode, tensors.prefill
        context = PagedContext(self._storage, self._ops, tensors.slot_mapping, count, decode, prefill, shares=shares)
        captured.sequence.replay(context, num_tokens)
        if not num_rows:
            return None
        assert tensors.sample_rows is not None, "a padded step says which rows are sampled"
        return self._forward.logits_of(captured.hidden, tensors.sample_rows)
