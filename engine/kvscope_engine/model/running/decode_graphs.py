"""CUDA graphs of decode steps: one a padded batch size, of whatever lengths, replayed from when it is captured.

Owns the graphs, the block tables that all of them read, one tensor a KV group, and the one of logits that all of them
write. States of recurrent layers are read by slots of the step; those of sequences that are added are nobody's. A
batch is padded to the next size with sequences of length 0 that write to slot -1. Launches are shaped by what the
pool can hold and cut by the lengths that are there, so that short requests do not pay for a long context. The largest
is captured before the first request, which proves that it can be done and gives all others their memory; another when
its size is wanted the second time, so that nobody waits at the start for sizes that never come. What fits no graph,
and every step with prefills in it, runs eagerly: such a step is as long as its prefill, and the decodes beside it are
back in a graph with the next one. A capture that fails costs its own size alone: batches of it take the next larger
graph that there is (`capture_failures`). Where decodes choose their blocks, what ranks them is as wide as the longest
request may be: there is a graph for each of some lengths too, so that it is at most four times as wide as the longest
one is. Where attention is measured, queries of all layers stay where their graph left them: a measured step is a
replay, and behind it one pass over the keys of each layer, as wide as the step is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final

import torch

from kvscope_engine.model.running.attention import DecodeBatch, KeptDecode, add_shares
from kvscope_engine.model.running.attention_scores import AttentionScores
from kvscope_engine.model.running.capture_failures import CaptureFailures, failure_words
from kvscope_engine.model.running.step_buffer import StepBuffer
from kvscope_engine.model.running.step_inputs import StepInputs
from kvscope_engine.model.running.step_tensors import StepTensors, put_decodes, table_width

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Of batches: products have tiles of 64 or 128 rows, in which rows that are added to a large batch cost nothing."""

_SHORTEST: Final = 4096
_GROWTH: Final = 4

Forward = Callable[[StepTensors, list[KeptDecode] | None], torch.Tensor]
"""Logits (batch, vocabulary) of a step of decodes; each layer's are put into the list, if there is one."""


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that get a graph, up to what can run together."""
    largest = min(max_num_seqs, SIZES[-1])
    return (*(size for size in SIZES if size < largest), largest)


def padded_size(sizes: tuple[int, ...], count: int) -> int | None:
    """The smallest of ascending `sizes` that holds `count`; None when none does."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def captured_lengths(max_tokens: int) -> tuple[int, ...]:
    """Tokens of the longest request for which there are graphs, where what is launched grows with them."""
    lengths, length = [max_tokens], _SHORTEST
    while length < max_tokens:
        lengths.append(length)
        length *= _GROWTH
    return tuple(sorted(lengths))


class DecodeGraphs:
    """Replays decode steps: `size_of`, `put` as the first of a step's buffer, `replay` once that was sent."""

    def __init__(
        self,
        forward: Forward,
        buffer: StepBuffer,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_tokens: int,
        block_size: int,
        num_groups: int = 1,
        keeps_queries: bool = False,
        is_by_length: bool = False,
        pad_state: int | None = None,
        failures: CaptureFailures | None = None,
    ) -> None:
        """`keeps_queries`: for `measure`. `is_by_length`: a graph for each of `captured_lengths`, not one for all.
        `pad_state`: of a model that keeps states, the slot of sequences that are added."""
        self.sizes = captured_sizes(max_num_seqs)
        self._lengths = captured_lengths(max_tokens) if is_by_length else (max_tokens,)
        self._forward = forward
        self._buffer = buffer
        self._device = device
        self._tables = [
            torch.zeros(self.sizes[-1], table_width(max_tokens, block_size), dtype=torch.int32, device=device)
            for _ in range(num_groups)
        ]
        self._sent_tables: list[torch.Tensor] = []
        self._logits: torch.Tensor | None = None
        self._block_size = block_size
        self._keeps_queries = keeps_queries
        self._pad_state = pad_state
        self._kept: dict[tuple[int, int], list[KeptDecode]] = {}
        self._graphs: dict[tuple[int, int], Any] = {}
        self._addresses: dict[int, tuple[int, ...]] = {}
        self._wanted: set[tuple[int, int]] = set()
        self.failures = failures or CaptureFailures(lambda note: None)
        self._length = max_tokens  # of the step that was put last
        self._pool: Any = None

    @property
    def largest(self) -> int:
        """To be captured before all others."""
        return self.sizes[-1]

    def capture_largest(self) -> str:
        """Before all others: the largest that can be captured. Why none can; empty: one was."""
        errors: dict[int, RuntimeError] = {}
        for size in reversed(self.sizes):
            try:
                self.capture(size)
            except RuntimeError as error:
                errors[size] = error
                torch.cuda.empty_cache()
                continue
            for larger, why in errors.items():
                self._note_failure(larger, self._lengths[-1], why)
            return ""
        return failure_words(errors[self.largest])

    def capture(self, size: int, length: int | None = None) -> None:
        """For requests of up to `length` tokens, or of any number. Waits for all that the device was given, and uses
        the buffer. Raises what CUDA or the model raise."""
        length = length or self._lengths[-1]
        self._buffer.begin()
        tensors = self._put(None, size, length)
        self._buffer.send()
        self._forward_into_logits(tensors)  # outside the graph, where libraries may allocate what they keep
        torch.cuda.synchronize()
        graph, kept = torch.cuda.CUDAGraph(), list[KeptDecode]()
        # Threads that copy beside the steps may go on meanwhile. `graph` does not leave its stream where its end fails.
        capturing = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with torch.cuda.stream(torch.cuda.current_stream(self._device)), capturing:
            self._forward_into_logits(tensors, kept if self._keeps_queries else None)
        self._pool = self._pool or graph.pool()
        self._kept[size, length] = kept
        self._graphs[size, length] = graph

    def size_of(self, inputs: StepInputs) -> int | None:
        """The smallest graph for a step of decodes alone, captured here if need be; None: there is none yet.

        Before anything of the step is in the buffer.
        """
        if inputs.num_single_token != inputs.num_tokens or len(inputs.sample_rows) != inputs.num_tokens:
            return None
        if inputs.state_slots is not None and (inputs.seq_lens == 1).any():  # who has no state to go on from
            return None
        size = padded_size(self.sizes, inputs.num_tokens)
        if size is None:
            return None
        key = size, self._length_of(inputs)
        if key in self._graphs:
            return size
        if key not in self._wanted:
            self._wanted.add(key)
            return None
        if self.failures.may_try(key) and self._try(key):
            return size
        return next((larger for larger in self.sizes if larger > size and (larger, key[1]) in self._graphs), None)

    def put(self, inputs: StepInputs, size: int) -> StepTensors:
        """A step into the buffer, where its graph reads it: the first thing that is put there."""
        return self._put(inputs, size, self._length_of(inputs))

    def replay(self, size: int, num_rows: int) -> torch.Tensor:
        """Logits (num_rows, vocabulary), valid until the next replay."""
        assert self._logits is not None, "nothing was captured"
        for table, sent in zip(self._tables, self._sent_tables, strict=False):
            count, width = sent.shape  # sent as narrow as they are, read at one place
            table[:count, :width].copy_(sent)
        self._graphs[size, self._length].replay()
        return self._logits[:num_rows]

    def measure(self, size: int, inputs: StepInputs, tensors: StepTensors, shares: AttentionScores) -> None:
        """Of the step that was just replayed, where its attention fell; by the lengths that it has."""
        assert tensors.decode is not None, "decodes were put"
        count, longest = len(inputs.seq_lens), int(inputs.seq_lens.max())
        width = table_width(longest, self._block_size)
        tables = tuple(table[:count, :width] for table in self._tables)
        batch = DecodeBatch(tables, tensors.decode.seq_lens[:count], longest)
        for query, kv, options in self._kept[size, self._length]:
            add_shares(shares, KeptDecode(query[:count], kv, options), batch)

    def try_again(self) -> bool:
        """One size that failed, or was given back, a while ago: to be called where nobody waits. Whether one was."""
        for key in self.failures.due():
            self._try(key)
            return True
        return False

    def release(self) -> bool:
        """Give all graphs and their memory back; they share it, so that one alone frees nothing. Whether any were."""
        for key in self._graphs:
            self.failures.put_off(key)
        had_any = bool(self._graphs)
        self._graphs.clear()
        self._kept.clear()
        self._pool = None
        return had_any

    def _try(self, key: Any) -> bool:
        try:
            self.capture(*key)
        except RuntimeError as error:  # torch.OutOfMemoryError among them
            self._note_failure(*key, error)
            return False
        self.failures.captured(key, f"batches of {key[0]}")
        return True

    def _note_failure(self, size: int, length: int, error: RuntimeError) -> None:
        self.failures.note((size, length), f"batches of {size}", error)

    def _length_of(self, inputs: StepInputs) -> int:
        length = padded_size(self._lengths, int(inputs.seq_lens.max()))
        return self._lengths[-1] if length is None else length

    def _put(self, inputs: StepInputs | None, size: int, length: int) -> StepTensors:
        self._length = length
        tensors, self._sent_tables = put_decodes(inputs, size, length, self._tables, self._buffer, self._pad_state)
        assert tensors.decode is not None, "decodes were put"
        read = [tensors.decode.seq_lens, *([] if tensors.state_slots is None else [tensors.state_slots])]
        address = tuple(int(tensor.storage_offset()) * tensor.element_size() for tensor in read)
        assert self._addresses.setdefault(size, address) == address, "a graph reads fixed addresses"
        return tensors

    def _forward_into_logits(self, tensors: StepTensors, kept: list[KeptDecode] | None = None) -> None:
        """All graphs write the first rows of one tensor; what else they allocate they share."""
        logits = self._forward(tensors, kept)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits[: len(logits)].copy_(logits)
