"""CUDA graphs of decode steps with several ranks: determines which batch sizes all ranks have captured.

The all-reduces are part of a graph. All ranks therefore capture the same sizes in the same order before the first
request, the largest first, and replay the size that rank 0 sends. None is captured later, since only rank 0 would know
that one is wanted. If a capture fails on one rank, no rank uses that size. Owns the sizes, not the graphs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from kvscope_engine.model.cuda_graphs.capture_failures import failure_reason
from kvscope_engine.model.cuda_graphs.decode_graphs import DecodeGraphs, padded_size
from kvscope_engine.model.input_batch.step_inputs import StepInputs

FAILED_ON_OTHER_RANK = "it failed on another rank"


class RankSync(Protocol):
    """Synchronization of all ranks, implemented by the executor's leader and by `distributed.rank_group`."""

    def recording(self) -> AbstractContextManager[None]:
        """Return a context in which all-reduces are skipped unless a graph records them, so that a failing rank blocks
        no other."""

    def all_agree(self, is_well: bool) -> bool:
        """Return whether `is_well` is true on all ranks, after waiting for all of them."""


class SharedGraphs:
    """CUDA graphs of this rank that are captured together with those of the other ranks."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        self._graphs = graphs
        self.sizes: tuple[int, ...] = ()
        """Batch sizes for which all ranks have a graph, ascending."""
        self._refusal = ""

    @property
    def is_refused(self) -> bool:
        return bool(self._refusal)

    def refuse(self, reason: str) -> None:
        """Record the reason why this rank captures no graphs.

        `capture_all` must still be called if other ranks call it, because they wait for this rank.
        """
        self._refusal = reason

    def capture_all(self, rank_sync: RankSync) -> list[str]:
        """Capture all sizes, concurrently on all ranks, before the first request.

        Returns one line of text per size that has no graph, with the reason.
        """
        failed: dict[int, str] = {}
        for size in reversed(self._graphs.sizes):
            with rank_sync.recording():
                reason = self._try_capture(size)
            if not rank_sync.all_agree(not reason):
                failed[size] = reason or FAILED_ON_OTHER_RANK
        self.sizes = tuple(size for size in self._graphs.sizes if size not in failed)
        if not self.sizes:
            return [
                f"CUDA graphs could not be captured, steps run without them (slower): {failed[self._graphs.largest]}"
            ]
        return [f"no CUDA graph for batches of {size}, which run slower: {reason}" for size, reason in failed.items()]

    def size_of(self, inputs: StepInputs) -> int | None:
        if inputs.num_single_token != inputs.num_tokens or len(inputs.sample_rows) != inputs.num_tokens:
            return None
        return padded_size(self.sizes, inputs.num_tokens)

    def _try_capture(self, size: int) -> str:
        """Capture one size. Returns the reason if it failed, else an empty string."""
        if self._refusal:
            return self._refusal
        error = self._graphs.capture(size)
        return "" if error is None else failure_reason(error)
