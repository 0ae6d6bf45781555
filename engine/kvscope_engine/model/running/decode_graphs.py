"""CUDA graphs of decode steps: one a padded batch size, captured at the start, replayed from then on.

Owns the static tensors that a graph reads and writes. A batch is padded to the next captured size with sequences
of length 0 that write to slot -1; batches larger than the largest are not for this file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.running.attention import DecodeBatch, PagedContext
from kvscope_engine.model.running.step_inputs import StepInputs, pad_decodes

SMALL_SIZES: Final = (1, 2, 4, 8)
SIZE_STEP: Final = 8
MAX_SIZE: Final = 256
NUM_WARM_UPS: Final = 2

Forward = Callable[[torch.Tensor, torch.Tensor, PagedContext], torch.Tensor]
"""(input_ids, positions, context) -> logits, (batch, vocabulary)."""


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that get a graph: small ones, then every eighth, up to what can run together."""
    largest = min(max_num_seqs, MAX_SIZE)
    sizes = {size for size in (*SMALL_SIZES, *range(SIZE_STEP, largest + 1, SIZE_STEP)) if size < largest}
    return (*sorted(sizes), largest)


def padded_size(sizes: tuple[int, ...], num_single_token: int) -> int | None:
    """The smallest captured size that holds `num_single_token`; None when none does."""
    index = bisect_left(sizes, num_single_token)
    return sizes[index] if index < len(sizes) else None


@dataclass(slots=True)
class StaticInputs:
    """The tensors that graphs read, made for the largest size; a smaller graph reads their first rows."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor

    @classmethod
    def allocate(cls, size: int, max_blocks: int, device: torch.device) -> StaticInputs:
        """Padding alone: nothing is written or attended to."""
        return cls(
            input_ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros(size, max_blocks, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(size, dtype=torch.int32, device=device),
        )

    def fill(self, padded: StepInputs) -> None:
        """Copy a padded step into the first rows."""
        for target, source in (
            (self.input_ids, padded.input_ids),
            (self.positions, padded.positions),
            (self.slot_mapping, padded.slot_mapping),
            (self.block_tables, padded.block_tables),
            (self.seq_lens, padded.seq_lens),
        ):
            _copy(target, source)


class DecodeGraphs:
    """Replays decode steps. Captures every size when made, largest first, so that all share one memory pool."""

    def __init__(
        self,
        forward: Forward,
        make_context: Callable[[torch.Tensor, DecodeBatch], PagedContext],
        *,
        max_num_seqs: int,
        max_blocks: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.sizes = captured_sizes(max_num_seqs)
        self._max_blocks = max_blocks
        self._max_model_len = max_model_len
        self._inputs = StaticInputs.allocate(self.sizes[-1], max_blocks, device)
        self._forward = forward
        self._make_context = make_context
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None
        for size in reversed(self.sizes):
            self._graphs[size] = self._capture(size)

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Logits of a step of decodes alone, (num_single_token, vocabulary), valid until the next; None: too large."""
        size = padded_size(self.sizes, inputs.num_tokens)
        if size is None or inputs.block_tables.shape[1] > self._max_blocks:
            return None
        self._inputs.fill(pad_decodes(inputs, size, self._max_blocks))
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[: inputs.num_tokens]

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Warm-up runs compile kernels and fill caches outside the graph, on a stream of their own."""
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                self._run_eagerly(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._run_eagerly(size)
        self._pool = self._pool or graph.pool()
        return graph, logits

    def _run_eagerly(self, size: int) -> torch.Tensor:
        """A context of its own each time: what layers share must be made inside the graph that reads it."""
        inputs = self._inputs
        decode = DecodeBatch(inputs.block_tables[:size], inputs.seq_lens[:size], self._max_model_len)
        context = self._make_context(inputs.slot_mapping[:size], decode)
        return self._forward(inputs.input_ids[:size], inputs.positions[:size], context)


def _copy(target: torch.Tensor, source: NDArray[Any]) -> None:
    target[: len(source)].copy_(torch.from_numpy(np.ascontiguousarray(source)), non_blocking=True)
