"""CUDA graphs of decode steps that several ranks run: which sizes all of them captured.

The sums over ranks are part of a graph. So all ranks capture the same sizes in the same order before the first request,
the largest first, and replay the size that rank 0 says; none is captured later, where rank 0 alone would know of it. A
capture that fails on one rank costs its size on all. Owns the sizes, not the graphs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from kvscope_engine.model.cuda_graphs.capture_failures import failure_words
from kvscope_engine.model.cuda_graphs.decode_graphs import DecodeGraphs, padded_size
from kvscope_engine.model.input_batch.step_inputs import StepInputs

ELSEWHERE = "it failed on another rank"


class Meeting(Protocol):
    """All ranks; see `distributed.rank_group`."""

    def recording(self) -> AbstractContextManager[None]:
        """Inside, sums are left out that no graph records: a rank that fails leaves nobody waiting for it."""

    def all_agree(self, is_well: bool) -> bool:
        """Whether all ranks say so; waits for them."""


class GraphsTogether:
    """Made on each rank; `sizes` is the same on all of them."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        self._graphs = graphs
        self.sizes: tuple[int, ...] = ()
        """Ascending; of batches that all ranks have a graph for."""
        self._refusal = ""

    @property
    def is_refused(self) -> bool:
        """Whether nothing is captured here."""
        return bool(self._refusal)

    def refuse(self, why: str) -> None:
        """Capture nothing on this rank, and say so to all that ask: `capture_all` has to be called all the same where
        others do, who wait for this one's word."""
        self._refusal = why

    def capture_all(self, meeting: Meeting) -> list[str]:
        """Before the first request, on all ranks at once. What has no graph and why, a line each."""
        failed: dict[int, str] = {}
        for size in reversed(self._graphs.sizes):
            with meeting.recording():
                why = self._try(size)
            if not meeting.all_agree(not why):
                failed[size] = why or ELSEWHERE
        self.sizes = tuple(size for size in self._graphs.sizes if size not in failed)
        if not self.sizes:
            return [
                f"CUDA graphs could not be captured, steps run without them (slower): {failed[self._graphs.largest]}"
            ]
        return [f"no CUDA graph for batches of {size}, which run slower: {why}" for size, why in failed.items()]

    def size_of(self, inputs: StepInputs) -> int | None:
        """The smallest for a step of decodes alone; None: there is none."""
        if inputs.num_single_token != inputs.num_tokens or len(inputs.sample_rows) != inputs.num_tokens:
            return None
        return padded_size(self.sizes, inputs.num_tokens)

    def _try(self, size: int) -> str:
        """Why not; empty: it was captured."""
        if self._refusal:
            return self._refusal
        error = self._graphs.capture(size)
        return "" if error is None else failure_words(error)
