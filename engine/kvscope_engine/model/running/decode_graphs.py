"""CUDA graphs of decode steps: one a padded batch size and length, captured at the start, replayed from then on.

Owns the graphs and the one tensor of logits that all of them write. A batch is padded to the next captured size with
sequences of length 0 that write to slot -1; its longest sequence chooses the length that launches are shaped for, so
that short requests do not pay for a long context. What fits no graph, and every step with prefills in it, runs
eagerly: such a step is as long as its prefill, and the decodes beside it are back in a graph with the next one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvscope_engine.model.running.step_buffer import StepBuffer
from kvscope_engine.model.running.step_inputs import StepInputs
from kvscope_engine.model.running.step_tensors import StepTensors, put_decodes

SMALL_SIZES: Final = (1, 2, 4, 8)
SIZE_STEP: Final = 8
MAX_SIZE: Final = 256
FIRST_LENGTH: Final = 2048
LENGTH_FACTOR: Final = 8

Forward = Callable[[StepTensors], torch.Tensor]
"""Logits (batch, vocabulary) of a step of decodes."""


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that get a graph: small ones, then every eighth, up to what can run together."""
    largest = min(max_num_seqs, MAX_SIZE)
    sizes = {size for size in (*SMALL_SIZES, *range(SIZE_STEP, largest + 1, SIZE_STEP)) if size < largest}
    return (*sorted(sizes), largest)


def captured_lengths(max_tokens: int) -> tuple[int, ...]:
    """Lengths that get graphs, each eight times the last, up to what a request can have."""
    lengths = []
    length = FIRST_LENGTH
    while length < max_tokens:
        lengths.append(length)
        length *= LENGTH_FACTOR
    return (*lengths, max_tokens)


def padded_size(sizes: tuple[int, ...], count: int) -> int | None:
    """The smallest of ascending `sizes` that holds `count`; None when none does."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What one graph was captured for."""

    size: int
    length: int


class DecodeGraphs:
    """Replays decode steps. Captures every shape when made, largest first, so that all share one memory pool."""

    def __init__(
        self,
        forward: Forward,
        buffer: StepBuffer,
        *,
        max_num_seqs: int,
        max_tokens: int,
        block_size: int,
    ) -> None:
        self.sizes = captured_sizes(max_num_seqs)
        self.lengths = captured_lengths(max_tokens)
        self._block_size = block_size
        self._forward = forward
        self._buffer = buffer
        self._logits: torch.Tensor | None = None
        self._graphs: dict[GraphShape, Any] = {}
        self._addresses: dict[GraphShape, int] = {}
        self._pool: Any = None

    @property
    def shapes(self) -> list[GraphShape]:
        """All that are captured, the largest first."""
        return [GraphShape(size, length) for length in reversed(self.lengths) for size in reversed(self.sizes)]

    def capture(self, shape: GraphShape) -> None:
        """The largest shape first. Raises what CUDA or the model raise."""
        self._buffer.begin()
        tensors = self._put(None, shape)
        self._buffer.send()
        self._forward_into_logits(tensors)  # outside the graph, where libraries may allocate what they keep
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._forward_into_logits(tensors)
        self._pool = self._pool or graph.pool()
        self._graphs[shape] = graph

    def shape_of(self, inputs: StepInputs) -> GraphShape | None:
        """The smallest graph for a step of decodes alone; None: there is none."""
        if inputs.num_single_token != inputs.num_tokens or len(inputs.sample_rows) != inputs.num_tokens:
            return None
        size = padded_size(self.sizes, inputs.num_tokens)
        length = padded_size(self.lengths, int(inputs.seq_lens.max()))
        shape = GraphShape(size, length) if size is not None and length is not None else None
        return shape if shape in self._graphs else None

    def put(self, inputs: StepInputs, shape: GraphShape) -> StepTensors:
        """A step into the buffer, where its graph reads it: the first thing that is put there."""
        return self._put(inputs, shape)

    def replay(self, shape: GraphShape, num_rows: int) -> torch.Tensor:
        """Logits (num_rows, vocabulary), valid until the next replay."""
        assert self._logits is not None, "nothing was captured"
        self._graphs[shape].replay()
        return self._logits[:num_rows]

    def _put(self, inputs: StepInputs | None, shape: GraphShape) -> StepTensors:
        tensors = put_decodes(inputs, shape.size, shape.length, self._block_size, self._buffer)
        assert tensors.decode is not None, "decodes were put"
        address = int(tensors.decode.block_tables.storage_offset())
        assert self._addresses.setdefault(shape, address) == address, "a graph reads fixed addresses"
        return tensors

    def _forward_into_logits(self, tensors: StepTensors) -> None:
        """All graphs write the first rows of one tensor; what else they allocate they share."""
        logits = self._forward(tensors)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits[: len(logits)].copy_(logits)
