"""CUDA graphs of decode steps, with or without drafts: one per padded batch size, for any sequence lengths.

Owns the graphs, the block tables that all of them read (one tensor per KV group), and the logits tensor that all of
them write. States of recurrent layers are read by slot; padding sequences use a slot that belongs to no request. A
batch is padded to the next size with sequences of length 0 that write to slot -1. Launch grids are sized for the pool's
capacity, and kernels stop at the actual lengths, so short requests do not pay for a long context.

All sizes are captured before the first request. The largest is captured first: it proves that capturing works, and the
other sizes reuse its memory. Steps that fit no graph, and all steps with prefills, run eagerly. A failed capture
affects only its own size; such batches use the next larger graph (`capture_failures`). If CUDA refuses the largest,
there are no graphs.

Steps with drafts have separate graphs, whose size is the total number of tokens. The number of tokens per request,
from 1 to 1 + max_drafts, is read on the device, as in attention over short query runs. The alternative, padding every
request to 1 + max_drafts rows, would multiply the work of steps in which few requests have drafts. Few sizes suffice
(`DRAFTED_SIZES`). Each of the larger sizes has two graphs: one for as many requests as tokens, and one for few
requests, whose attention is split among programs (`kvscope_kernels.decode.bounds.max_cut_runs`).

If decodes choose their blocks (sparse attention), ranking is as wide as the longest possible request. There is then a
graph for each of several lengths, so that ranking is at most four times as wide as the longest request needs. Graphs of
the largest length are captured at the start. They also run shorter requests until a graph of the shorter length has
been captured, while the engine is idle. If attention is measured, all layers of a graph add to scores per block
(`AttentionScores`), which the host reads for the measured steps.

See docs/internals/decisions/0015-cuda-graphs-are-captured-at-the-start.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from kvscope_engine.model.cuda_graphs.capture_failures import (
    CaptureFailures,
    failure_reason,
    is_refusal,
    try_capture,
    try_each_key,
)
from kvscope_engine.model.device_memory.read_back import RowReadBack, Rows
from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.input_batch.step_limits import StepLimits
from kvscope_engine.model.input_batch.step_tensors import StepTensors, stage_decodes, stage_drafted, table_width
from kvscope_engine.model.layers.attention.attention_scores import AttentionScores

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes of captured decode graphs. Matmuls have tiles of 64 or 128 rows, so padding rows of a large batch cost
nothing.
"""

DRAFTED_SIZES: Final = (4, 8, 16, 32, 64, 128, 256)
"""Token counts of steps with drafts. There are fewer than `SIZES` because all are captured at the start."""

FEW_REQUESTS: Final = 32
"""Maximum number of requests of the graphs with drafts that are captured for few requests. With 8 KV heads,
about this many requests occupy a whole GPU without splitting attention.
"""

_SHORTEST_LENGTH: Final = 4096
_LENGTH_FACTOR: Final = 4

Forward = Callable[[StepTensors, AttentionScores | None], torch.Tensor]
"""Computes the logits (batch, vocabulary) of a step of decodes. If scores are passed, each layer adds to them."""


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    largest = min(max_num_seqs, SIZES[-1])
    return (*(size for size in SIZES if size < largest), largest)


def drafted_sizes(max_num_seqs: int, max_drafts: int) -> tuple[int, ...]:
    """Return the token counts of steps with drafts that get a graph, up to the largest that a step may sample; empty
    without drafts.
    """
    if not max_drafts:
        return ()
    largest = min(max(max_num_seqs, 1 + max_drafts), SIZES[-1])
    return (*(size for size in DRAFTED_SIZES if size < largest), largest)


def max_logits_rows(max_num_seqs: int, max_drafts: int) -> int:
    return max(captured_sizes(max_num_seqs)[-1], *drafted_sizes(max_num_seqs, max_drafts), 0)


def padded_size(sizes: tuple[int, ...], count: int) -> int | None:
    """Return the smallest of ascending `sizes` that is at least `count`; None if there is none."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def captured_lengths(max_tokens: int) -> tuple[int, ...]:
    """Return the request lengths in tokens for which there are separate graphs, if launch sizes grow with the
    length."""
    lengths, length = [max_tokens], _SHORTEST_LENGTH
    while length < max_tokens:
        lengths.append(length)
        length *= _LENGTH_FACTOR
    return tuple(sorted(lengths))


class _GraphKey(NamedTuple):
    """Identifies a graph.

    Without drafts, the graph runs `size` requests of up to `length` tokens each, and `num_drafted` is 0. With drafts,
    it runs `size` tokens of `num_drafted` requests.
    """

    size: int
    length: int
    num_drafted: int = 0

    @property
    def num_requests(self) -> int:
        return self.num_drafted or self.size

    @property
    def description(self) -> str:
        drafted = f"steps with drafts of {self.size} tokens and {self.num_drafted} requests"
        return drafted if self.num_drafted else f"batches of {self.size}"


class DecodeGraphs:
    """Captures and replays CUDA graphs of decode steps.

    For each step, call `size_of`, then the buffer's `begin`, `stage` (before anything else is put into the buffer), the
    buffer's `send`, and `replay`.
    """

    def __init__(
        self,
        forward: Forward,
        buffer: StepBuffer,
        limits: StepLimits,
        *,
        measures_attention: bool = False,
        is_by_length: bool = False,
        pad_state: int | None = None,
        failures: CaptureFailures | None = None,
    ) -> None:
        """Create without graphs.

        Args:
            forward: Runs the model on a step.
            buffer: Input buffer of steps, on the device of the model.
            limits: Sizes of the largest step.
            measures_attention: Whether graphs compute scores per block, for `start_score_copy`.
            is_by_length: Whether each size has a graph for each of `captured_lengths`, instead of one for all lengths.
                Worthwhile if launch sizes grow with the length, as in sparse attention.
            pad_state: State slot of padding sequences, for models with recurrent layers.
            failures: Record of failed captures.
        """
        max_num_seqs, max_drafts, max_tokens = limits.max_num_seqs, limits.max_drafts, limits.max_request_tokens
        self.sizes = captured_sizes(max_num_seqs)
        self.drafted_sizes = drafted_sizes(max_num_seqs, max_drafts)
        self._max_logits_rows = max_logits_rows(max_num_seqs, max_drafts)
        self._max_drafts = max_drafts
        self._lengths = captured_lengths(max_tokens) if is_by_length else (max_tokens,)
        self._forward = forward
        self._buffer = buffer
        self._device = buffer.device
        self._tables = [
            torch.zeros(
                self.sizes[-1], table_width(max_tokens, limits.block_size), dtype=torch.int32, device=buffer.device
            )
            for _ in range(limits.num_groups)
        ]
        self._sent_tables: list[torch.Tensor] = []
        self._logits: torch.Tensor | None = None
        self._block_size = limits.block_size
        self._score_totals: torch.Tensor | None = None
        if measures_attention:
            self._score_totals = torch.zeros(limits.num_groups, *self._tables[0].shape, device=buffer.device)
        self._pad_state = pad_state
        self._scores: dict[_GraphKey, AttentionScores] = {}
        self._graphs: dict[_GraphKey, Any] = {}
        self._addresses: dict[tuple[int, int], tuple[int, ...]] = {}
        """Offsets in the input buffer, in bytes, that graphs of a (size, num_drafted) read. They must never change."""
        self._requested: set[_GraphKey] = set()
        self.failures = failures or CaptureFailures(lambda note: None)
        self._current_key = _GraphKey(0, max_tokens)  # key of the graph that the last `stage` chose
        self._pool: Any = None

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def capture_all(self) -> str:
        """Capture all sizes before the first request, and report those that fail.

        Returns the reason if no size could be captured, else an empty string.
        """
        keys = [_GraphKey(size, self._lengths[-1]) for size in reversed(self.sizes)]
        errors = try_each_key(keys, self._try_capture)
        if len(errors) == len(keys):
            return failure_reason(errors[keys[0]])
        for key, error in errors.items():
            self._report_failure(key, error)
        return ""

    def capture_drafted(self) -> None:
        """Capture all sizes of steps with drafts before the first request.

        Sizes that fail are left out and reported; if all fail, only the first is reported.
        """
        keys = self._drafted_keys()
        errors = try_each_key(keys, self._try_capture)
        has_none = len(errors) == len(keys)
        is_permanent = has_none and is_refusal(errors[keys[0]])
        for key, error in errors.items():
            if key is keys[0] or not has_none:
                self.failures.record_and_report(key, key.description, error, is_permanent=is_permanent)
            else:
                self.failures.record(key, error, is_permanent=is_permanent)

    def capture(self, size: int) -> Exception | None:
        """Capture the graph for `size` requests of any length. Returns the error if memory was missing or a library
        failed.

        Waits for all work enqueued on the device, and uses the input buffer.
        """
        return self._try_capture(_GraphKey(size, self._lengths[-1]))

    def size_of(self, inputs: StepInputs) -> int | None:
        """Return the size of the smallest graph for a step that consists of decodes, with or without drafts. Returns
        None if no graph fits.

        Must be called before data of the step is written into the buffer, because a released graph is captured again
        here once its pause is over. Otherwise an engine that is never idle would not get the graph back.
        """
        if inputs.is_drafted:
            drafted = self._drafted_key(inputs)
            return None if drafted is None else drafted.size
        if inputs.num_single_token != inputs.num_tokens or len(inputs.sample_rows) != inputs.num_tokens:
            return None
        if (
            inputs.state_slots is not None and (inputs.seq_lens == 1).any()
        ):  # a first token has no state to continue from
            return None
        size = padded_size(self.sizes, inputs.num_tokens)
        if size is None:
            return None
        key = _GraphKey(size, self._length_of(inputs))
        if key not in self._graphs:
            if not self.failures.contains(key):
                self._requested.add(key)
            elif self.failures.may_try(key) and (error := self._try_capture(key)) is not None:
                self._report_failure(key, error)
        graph_key = self._decode_key(key)
        return None if graph_key is None else graph_key.size

    @property
    def num_requests(self) -> int:
        """Maximum number of requests of the graph chosen by the last `stage`."""
        return self._current_key.num_requests

    def stage(self, inputs: StepInputs, size: int) -> StepTensors:
        """Write a step into the buffer where its graph reads it, for `replay`. `size` is the result of `size_of`.

        Must be the first data written after the buffer's `begin`.
        """
        drafted = self._drafted_key(inputs) if inputs.is_drafted else None
        decodes = _GraphKey(size, self._length_of(inputs))
        return self._stage_key(inputs, drafted or self._decode_key(decodes) or decodes)

    def replay(self, num_rows: int) -> torch.Tensor:
        """Run the step that was staged. Returns logits (num_rows, vocabulary), valid until the next replay."""
        assert self._logits is not None, "nothing was captured"
        for table, sent in zip(self._tables, self._sent_tables, strict=False):
            count, width = sent.shape  # uploaded only as wide as needed, read at a fixed address
            table[:count, :width].copy_(sent)
        self._graphs[self._current_key].replay()
        return self._logits[:num_rows]

    def start_score_copy(self, inputs: StepInputs, back: RowReadBack) -> Rows | None:
        """Start copying the scores of the step that was just replayed to the host; see `AttentionScores.start`."""
        width = table_width(int(inputs.seq_lens.max()), self._block_size)
        return self._scores[self._current_key].start(back, len(inputs.seq_lens), width)

    def capture_pending(self) -> bool:
        """Capture one graph that failed, was released, or was requested by a step. Call it while the engine is idle.

        Returns whether there was one.
        """
        key: Any
        for key in () if self.failures.is_suspended else (*self.failures.due_keys(), *self._requested):
            self._requested.discard(key)
            if (error := self._try_capture(key)) is not None:
                self._report_failure(key, error)
            return True
        return False

    @property
    def is_waiting(self) -> bool:
        """Whether `capture_pending` has something to capture, now or after a pause."""
        return (bool(self._requested) and not self.failures.is_suspended) or self.failures.is_waiting

    def release(self) -> bool:
        """Release all graphs and their memory, which they share. They are captured again later, the largest first.

        Returns whether there were any.
        """
        for key in sorted(self._graphs, reverse=True):
            self.failures.defer(key)
        had_any = bool(self._graphs)
        self._graphs.clear()
        self._scores.clear()
        self._pool = None
        return had_any

    def _drafted_keys(self) -> list[_GraphKey]:
        """Return the keys of drafted graphs, the largest first. The other graphs reuse the memory of the largest."""
        request_capacities = (
            (size, capacity) for size in self.drafted_sizes for capacity in {min(size, FEW_REQUESTS), size}
        )
        keys = {
            _GraphKey(size, self._lengths[-1], min(capacity, self.largest)) for size, capacity in request_capacities
        }
        return sorted(keys, reverse=True)

    def _try_capture(self, key: _GraphKey) -> Exception | None:
        error = try_capture(partial(self._capture, key))
        if error is None:
            self.failures.record_capture(key, key.description)
        elif is_refusal(error):
            self._pool = None  # this pool's memory would never be released: later graphs use a new one
        return error

    def _capture(self, key: _GraphKey) -> None:
        self._buffer.begin()
        tensors = self._stage_key(None, key)
        self._buffer.send()
        self._forward_into_logits(tensors)  # outside the graph, so that libraries can allocate permanent workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # "thread_local" lets copy threads continue. `torch.cuda.graph` does not restore the stream if the capture's end
        # fails, hence the outer stream context.
        capturing = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with torch.cuda.stream(torch.cuda.current_stream(self._device)), capturing:
            scores = self._forward_into_logits(tensors)
        self._pool = self._pool or graph.pool()
        if scores is not None:
            self._scores[key] = scores
        self._graphs[key] = graph

    def _drafted_key(self, inputs: StepInputs) -> _GraphKey | None:
        num_tokens, num_requests = inputs.num_tokens, len(inputs.seq_lens)
        fitting = (key for key in self._graphs if key.size >= num_tokens and key.num_drafted >= num_requests)
        return min(fitting, default=None)

    def _decode_key(self, requested: _GraphKey) -> _GraphKey | None:
        fitting = (
            key
            for key in self._graphs
            if not key.num_drafted and key.size >= requested.size and key.length >= requested.length
        )
        return min(fitting, default=None)

    def _report_failure(self, key: _GraphKey, error: Exception) -> None:
        self.failures.record_and_report(key, key.description, error)

    def _length_of(self, inputs: StepInputs) -> int:
        length = padded_size(self._lengths, int(inputs.seq_lens.max()))
        return self._lengths[-1] if length is None else length

    def _stage_key(self, inputs: StepInputs | None, key: _GraphKey) -> StepTensors:
        self._current_key = key
        size, length, buffer = key.size, key.length, self._buffer
        if key.num_drafted:
            max_batch = key.num_drafted, 1 + self._max_drafts
            tensors, self._sent_tables = stage_drafted(inputs, size, *max_batch, length, self._tables, buffer)
        else:
            tensors, self._sent_tables = stage_decodes(inputs, size, length, self._tables, buffer, self._pad_state)
        batch = tensors.decode or tensors.prefill
        assert batch is not None, "a step has requests"
        read_tensors = [batch.seq_lens, *([] if tensors.state_slots is None else [tensors.state_slots])]
        address = tuple(int(tensor.storage_offset()) * tensor.element_size() for tensor in read_tensors)
        graph_id = size, key.num_drafted
        assert self._addresses.setdefault(graph_id, address) == address, "a graph reads fixed addresses"
        return tensors

    def _forward_into_logits(self, tensors: StepTensors) -> AttentionScores | None:
        """Run the model and write the logits to the first rows of a tensor that all graphs share."""
        scores = None
        if self._score_totals is not None and tensors.decode is not None:
            scores = AttentionScores(self._score_totals)
            self._score_totals[:, : tensors.num_single_token].zero_()
        logits = self._forward(tensors, scores)
        if self._logits is None:
            self._logits = logits.new_empty(self._max_logits_rows, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)
        return scores
