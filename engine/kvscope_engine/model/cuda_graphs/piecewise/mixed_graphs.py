"""Graphs of steps with prefills in them, by how many tokens they compute: padded to the next size and replayed.

Owns the sizes and what all of them share. All are captured before the first request, the largest first, which gives
the others their memory: nobody's first token waits for one. A size that could not be captured takes the next larger
one, and is tried again while nothing runs, if memory was what it lacked. A step is padded with tokens that write to
slot -1 and attend to nothing. Attention runs eagerly, since its launches are shaped by the step's lengths, and the
head, since it runs on the sampled rows alone. Steps of more tokens than the largest size run eagerly: there the
device has more to do in a launch than the host in handing it over.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from kvscope_engine.model.cuda_graphs.capture_failures import CaptureFailures, failure_of, failures_of, is_refusal
from kvscope_engine.model.cuda_graphs.piecewise.piece_recorder import (
    Attend,
    Crossings,
    CutContext,
    PieceRecorder,
    Pieces,
)
from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.input_batch.step_tensors import StepTensors, put_inputs, put_padded
from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.layers.attention.attention_scores import AttentionScores
from kvscope_engine.model.layers.attention.paged_attention import PagedContext
from kvscope_engine.model.layers.forward import Forward
from kvscope_kernels import Ops

SIZES: Final = (16, 32, 64, 128, 256, 512)
"""Tokens: below the first a product's tile is padded anyway."""


def mixed_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Token counts that get graphs, up to what a step can have."""
    largest = min(max_num_batched_tokens, SIZES[-1])
    return (*(size for size in SIZES if size < largest), largest)


def _words(size: int) -> str:
    return f"steps with prefills of {size} tokens"


@dataclass(frozen=True, slots=True)
class _Captured:
    pieces: Pieces
    hidden: torch.Tensor
    """(size, hidden), what the last of them leaves."""
    input_ids: torch.Tensor


class MixedGraphs:
    """Replays steps with prefills: `size_of`, `put` as the first of a step's buffer, `replay` once that was sent."""

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
        self.sizes = mixed_sizes(max_num_batched_tokens)
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
        """The smallest captured one that holds a step with prefills; None: there is none."""
        if inputs.num_single_token == inputs.num_tokens:
            return None
        return next((size for size in self.sizes if size >= inputs.num_tokens and size in self._captured), None)

    def capture_all(self) -> None:
        """Before the first request. A size that fails is left out, and told of."""
        errors = failures_of(self.sizes[::-1], self._try)
        if len(errors) == len(self.sizes):  # of a model that cannot be cut there, say: once is enough
            largest = self.sizes[-1]
            for_good = is_refusal(errors[largest])
            for size in self.sizes[:-1]:
                self.failures.refuse(size, errors[size], for_good=for_good)
            self.failures.note(largest, "steps with prefills", errors[largest], for_good=for_good)
            return
        for size, error in errors.items():
            self._note_failure(size, error)

    def try_again(self) -> bool:
        """One size that failed, or was given back, a while ago, the largest first: to be called where nobody waits.
        Whether one was."""
        for size in reversed(self.sizes):
            if size not in self._captured and self.failures.may_try(size):
                error = self._try(size)
                if error is not None:
                    self._note_failure(size, error)
                else:
                    self.failures.captured(size, _words(size))
                return True
        return False

    @property
    def is_waiting(self) -> bool:
        """Whether anything is left for `try_again`."""
        return self.failures.is_waiting

    def release(self) -> bool:
        """Give all graphs and their memory back, which they share. Whether there were any."""
        for size in self._captured:
            self.failures.put_off(size)
        had_any = bool(self._captured)
        self._captured.clear()
        self._pool = self._stream = None
        return had_any

    def _try(self, size: int) -> Exception | None:
        # Whatever a class of models raises that is called in two parts.
        error = failure_of(partial(self._capture, size), lambda _: True)
        if error is not None and (not self._captured or is_refusal(error)):
            # No graph holds the pool, which is gone then, or nothing in it is ever given back.
            self._pool = self._stream = None
        return error

    def _note_failure(self, size: int, error: Exception) -> None:
        self.failures.note(size, _words(size), error)

    def _capture(self, size: int) -> None:
        """Raises what CUDA or the model raise. Waits for all that the device was given, and uses the buffer."""
        self._buffer.begin()
        ids, positions, slots = put_padded(None, size, self._buffer, self._storage.num_groups)
        self._buffer.send()
        found: list[torch.Tensor] = []

        def run(attends: Attend) -> None:
            context = CutContext(self._storage, self._ops, slots, 0, None, None, attends=attends)
            hidden = self._forward.hidden(ids, positions, context)
            found[:] = [self._crossings.rows("hidden", hidden)]
            found[0].copy_(hidden)

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        pieces = PieceRecorder(self._crossings, self._pool, self._stream).record(run)
        self._captured[size] = _Captured(pieces, found[0], ids)

    def num_graphs(self, size: int) -> int:
        """That a step of this size replays."""
        return len(self._captured[size].pieces.graphs)

    def put(self, inputs: StepInputs, size: int) -> StepTensors:
        """A step into the buffer, where its graphs read it: the first thing that is put there."""
        tensors = put_inputs(inputs, self._buffer, size)
        captured = self._captured[size].input_ids
        assert tensors.input_ids.data_ptr() == captured.data_ptr(), "graphs read fixed addresses"
        self._step = tensors, inputs.num_tokens
        return tensors

    def replay(self, size: int, num_rows: int, shares: AttentionScores | None = None) -> torch.Tensor | None:
        """Logits (num_rows, vocabulary) of the step that was put, None where nothing is sampled; `shares` measures."""
        assert self._step is not None, "nothing was put"
        (tensors, num_tokens), self._step = self._step, None
        captured = self._captured[size]
        count, decode, prefill = tensors.num_single_token, tensors.decode, tensors.prefill
        context = PagedContext(self._storage, self._ops, tensors.slot_mapping, count, decode, prefill, shares=shares)
        captured.pieces.replay(context, num_tokens)
        if not num_rows:
            return None
        assert tensors.sample_rows is not None, "a padded step says which rows are sampled"
        return self._forward.logits_of(captured.hidden, tensors.sample_rows)
