"""CUDA graphs of decode steps, with drafts or without: one a padded size, of whatever lengths.

Owns the graphs, the block tables that all of them read, one tensor a KV group, and the one of logits that all of them
write. States of recurrent layers are read by slots of the step; those of sequences that are added are nobody's. A
batch is padded to the next size with sequences of length 0 that write to slot -1. Launches are shaped by what the
pool can hold and cut by the lengths that are there, so that short requests do not pay for a long context. All sizes
are captured before the first request, the largest first, which proves that it can be done and gives all others their
memory. What fits no graph, and every step with prefills in it, runs eagerly: such a step is as long as its prefill, and
the decodes beside it are back in a graph with the next one. A capture that fails costs its own size alone: batches of
it take the next larger graph that there is (`capture_failures`). Where CUDA refuses the largest there is none.

Steps with drafts have graphs of their own, by the tokens that they compute: a request has one to all that may be
guessed and one, which is read on the device, as attention to short runs of queries does. By rows a request, padded to
all that may be guessed, a step in which few have drafts would compute several times what it needs; by tokens its sizes
are few, and its logits those of the largest batch, since a step samples no more rows than that. The larger sizes are
there twice, for as many requests as tokens and for few, whose attention is split among programs (`most_cut_runs`).

Where decodes choose their blocks, what ranks them is as wide as the longest request may be: there is a graph for each
of some lengths too, so that it is at most four times as wide as the longest one is. The longest is captured at the
start, and serves until a shorter one that was wanted is captured, while nobody waits. Where attention is measured, all
layers of a graph add up where it fell, which the host reads of the steps that are measured.

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
    failure_of,
    failure_words,
    failures_of,
    is_refusal,
)
from kvscope_engine.model.device_memory.read_back import Rows, RowsBack
from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.input_batch.step_tensors import StepTensors, put_decodes, put_drafted, table_width
from kvscope_engine.model.layers.attention.attention_scores import AttentionScores

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Of batches: products have tiles of 64 or 128 rows, in which rows that are added to a large batch cost nothing."""

DRAFTED_SIZES: Final = (4, 8, 16, 32, 64, 128, 256)
"""Of tokens, where drafts are among them. Captured at the start, all of them: hence fewer."""

FEW_REQUESTS: Final = 32
"""With drafts: about so many requests of 8 KV heads fill a device without being split."""

_SHORTEST: Final = 4096
_GROWTH: Final = 4

Forward = Callable[[StepTensors, AttentionScores | None], torch.Tensor]
"""Logits (batch, vocabulary) of a step of decodes; each layer adds where its attention fell, if that is asked for."""


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that get a graph, up to what can run together."""
    largest = min(max_num_seqs, SIZES[-1])
    return (*(size for size in SIZES if size < largest), largest)


def drafted_sizes(max_num_seqs: int, max_drafts: int) -> tuple[int, ...]:
    """Token counts of steps with drafts that get a graph, up to what a step may sample; none where nothing is
    guessed."""
    if not max_drafts:
        return ()
    largest = min(max(max_num_seqs, 1 + max_drafts), SIZES[-1])
    return (*(size for size in DRAFTED_SIZES if size < largest), largest)


def most_rows(max_num_seqs: int, max_drafts: int) -> int:
    """Rows of logits that graphs write at most."""
    return max(captured_sizes(max_num_seqs)[-1], *drafted_sizes(max_num_seqs, max_drafts), 0)


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


class _Key(NamedTuple):
    """Which graph: `size` requests of up to `length` tokens each; with drafts `size` tokens of `num_drafted` requests,
    which is 0 without."""

    size: int
    length: int
    num_drafted: int = 0

    @property
    def num_requests(self) -> int:
        """That it has room for."""
        return self.num_drafted or self.size

    @property
    def words(self) -> str:
        """Of the steps that it is for."""
        drafted = f"steps with drafts of {self.size} tokens and {self.num_drafted} requests"
        return drafted if self.num_drafted else f"batches of {self.size}"


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
        measures: bool = False,
        is_by_length: bool = False,
        pad_state: int | None = None,
        max_drafts: int = 0,
        failures: CaptureFailures | None = None,
    ) -> None:
        """`measures`: for `shares_of`. `is_by_length`: a graph for each of `captured_lengths`, not one for all.
        `pad_state`: of a model that keeps states, the slot of sequences that are added. `max_drafts`: of a request."""
        self.sizes = captured_sizes(max_num_seqs)
        self.drafted_sizes = drafted_sizes(max_num_seqs, max_drafts)
        self._most_rows = most_rows(max_num_seqs, max_drafts)
        self._max_drafts = max_drafts
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
        self._totals: torch.Tensor | None = None
        if measures:
            self._totals = torch.zeros(num_groups, *self._tables[0].shape, device=device)
        self._pad_state = pad_state
        self._shares: dict[_Key, AttentionScores] = {}
        self._graphs: dict[_Key, Any] = {}
        self._addresses: dict[tuple[int, int], tuple[int, ...]] = {}
        self._wanted: set[_Key] = set()
        self.failures = failures or CaptureFailures(lambda note: None)
        self._put_key = _Key(0, max_tokens)  # of the step that was put last
        self._pool: Any = None

    @property
    def largest(self) -> int:
        """Captured before all others."""
        return self.sizes[-1]

    def capture_all(self) -> str:
        """Before the first request: all sizes. Those that fail are told of. Why none can; empty: one was."""
        keys = [_Key(size, self._lengths[-1]) for size in reversed(self.sizes)]
        errors = failures_of(keys, self._try)
        if len(errors) == len(keys):
            return failure_words(errors[keys[0]])
        for key, error in errors.items():
            self._note_failure(key, error)
        return ""

    def capture_drafted(self) -> None:
        """Before the first request, all sizes of steps with drafts. One that fails is left out, and told of; of a model
        that cannot be captured so once is enough."""
        keys = self._drafted_keys()
        errors = failures_of(keys, self._try)
        has_none = len(errors) == len(keys)
        for_good = has_none and is_refusal(errors[keys[0]])
        for key, error in errors.items():
            if key is keys[0] or not has_none:
                self.failures.note(key, key.words, error, for_good=for_good)
            else:
                self.failures.refuse(key, error, for_good=for_good)

    def _drafted_keys(self) -> list[_Key]:
        """The largest first, which gives the others their memory."""
        rooms = ((size, room) for size in self.drafted_sizes for room in {min(size, FEW_REQUESTS), size})
        keys = {_Key(size, self._lengths[-1], min(room, self.largest)) for size, room in rooms}
        return sorted(keys, reverse=True)

    def _drafted_key(self, inputs: StepInputs) -> _Key | None:
        """The smallest that is captured and has room for the step."""
        num_tokens, num_requests = inputs.num_tokens, len(inputs.seq_lens)
        fitting = (key for key in self._graphs if key.size >= num_tokens and key.num_drafted >= num_requests)
        return min(fitting, default=None)

    def capture(self, size: int) -> Exception | None:
        """For that many requests of any length; what memory or a library failed with. Waits for all that the device was
        given, and uses the buffer."""
        return self._try(_Key(size, self._lengths[-1]))

    def _try(self, key: _Key) -> Exception | None:
        error = failure_of(partial(self._capture, key))
        if error is None:
            self.failures.captured(key, key.words)
        elif is_refusal(error):
            self._pool = None  # whose memory would never be given back: later graphs have another
        return error

    def _capture(self, key: _Key) -> None:
        self._buffer.begin()
        tensors = self._put(None, key)
        self._buffer.send()
        self._forward_into_logits(tensors)  # outside the graph, where libraries may allocate what they keep
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads that copy beside the steps may go on meanwhile. `graph` does not leave its stream where its end fails.
        capturing = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with torch.cuda.stream(torch.cuda.current_stream(self._device)), capturing:
            shares = self._forward_into_logits(tensors)
        self._pool = self._pool or graph.pool()
        if shares is not None:
            self._shares[key] = shares
        self._graphs[key] = graph

    def size_of(self, inputs: StepInputs) -> int | None:
        """The smallest graph that there is for a step of decodes alone, or with drafts; None: there is none. One that
        was lost is captured here, once its pause is over: who is never idle would have none again.

        Before anything of the step is in the buffer.
        """
        if inputs.is_drafted:
            drafted = self._drafted_key(inputs)
            return None if drafted is None else drafted.size
        if inputs.num_single_token != inputs.num_tokens or len(inputs.sample_rows) != inputs.num_tokens:
            return None
        if inputs.state_slots is not None and (inputs.seq_lens == 1).any():  # who has no state to go on from
            return None
        size = padded_size(self.sizes, inputs.num_tokens)
        if size is None:
            return None
        key = _Key(size, self._length_of(inputs))
        if key not in self._graphs:
            if not self.failures.has(key):
                self._wanted.add(key)
            elif self.failures.may_try(key) and (error := self._try(key)) is not None:
                self._note_failure(key, error)
        found = self._decode_key(key)
        return None if found is None else found.size

    def _decode_key(self, wanted: _Key) -> _Key | None:
        """The smallest that is captured and holds as much."""
        fitting = (
            key
            for key in self._graphs
            if not key.num_drafted and key.size >= wanted.size and key.length >= wanted.length
        )
        return min(fitting, default=None)

    @property
    def num_requests(self) -> int:
        """That the graph of the step that was put has room for."""
        return self._put_key.num_requests

    def put(self, inputs: StepInputs, size: int) -> StepTensors:
        """A step into the buffer, where its graph reads it: the first thing that is put there."""
        drafted = self._drafted_key(inputs) if inputs.is_drafted else None
        decodes = _Key(size, self._length_of(inputs))
        return self._put(inputs, drafted or self._decode_key(decodes) or decodes)

    def replay(self, size: int, num_rows: int) -> torch.Tensor:
        """The step that was put. Logits (num_rows, vocabulary), valid until the next replay."""
        assert self._logits is not None, "nothing was captured"
        for table, sent in zip(self._tables, self._sent_tables, strict=False):
            count, width = sent.shape  # sent as narrow as they are, read at one place
            table[:count, :width].copy_(sent)
        self._graphs[self._put_key._replace(size=size)].replay()
        return self._logits[:num_rows]

    def shares_of(self, size: int, inputs: StepInputs, back: RowsBack) -> Rows | None:
        """Of the step that was just replayed, where its attention fell: it starts to come down."""
        width = table_width(int(inputs.seq_lens.max()), self._block_size)
        return self._shares[self._put_key._replace(size=size)].start(back, len(inputs.seq_lens), width)

    def try_again(self) -> bool:
        """One size that failed or was given back a while ago, or was wanted: to be called where nobody waits. Whether
        there was one."""
        key: Any
        for key in () if self.failures.is_held else (*self.failures.due(), *self._wanted):
            self._wanted.discard(key)
            if (error := self._try(key)) is not None:
                self._note_failure(key, error)
            return True
        return False

    @property
    def is_waiting(self) -> bool:
        """Whether anything is left for `try_again`."""
        return (bool(self._wanted) and not self.failures.is_held) or self.failures.is_waiting

    def release(self) -> bool:
        """Give all graphs and their memory back; they share it, so that one alone frees nothing. Whether any were. They
        come back the largest first, as at the start."""
        for key in sorted(self._graphs, reverse=True):
            self.failures.put_off(key)
        had_any = bool(self._graphs)
        self._graphs.clear()
        self._shares.clear()
        self._pool = None
        return had_any

    def _note_failure(self, key: _Key, error: Exception) -> None:
        self.failures.note(key, key.words, error)

    def _length_of(self, inputs: StepInputs) -> int:
        length = padded_size(self._lengths, int(inputs.seq_lens.max()))
        return self._lengths[-1] if length is None else length

    def _put(self, inputs: StepInputs | None, key: _Key) -> StepTensors:
        self._put_key = key
        size, length, buffer = key.size, key.length, self._buffer
        if key.num_drafted:
            most = key.num_drafted, 1 + self._max_drafts
            tensors, self._sent_tables = put_drafted(inputs, size, *most, length, self._tables, buffer)
        else:
            tensors, self._sent_tables = put_decodes(inputs, size, length, self._tables, buffer, self._pad_state)
        batch = tensors.decode or tensors.prefill
        assert batch is not None, "a step has requests"
        read = [batch.seq_lens, *([] if tensors.state_slots is None else [tensors.state_slots])]
        address = tuple(int(tensor.storage_offset()) * tensor.element_size() for tensor in read)
        place = size, key.num_drafted
        assert self._addresses.setdefault(place, address) == address, "a graph reads fixed addresses"
        return tensors

    def _forward_into_logits(self, tensors: StepTensors) -> AttentionScores | None:
        """All graphs write the first rows of the same tensors; what else they allocate they share."""
        shares = None
        if self._totals is not None and tensors.decode is not None:
            shares = AttentionScores(self._totals)
            self._totals[:, : tensors.num_single_token].zero_()
        logits = self._forward(tensors, shares)
        if self._logits is None:
            self._logits = logits.new_empty(self._most_rows, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)
        return shares
