"""A model's launches as graphs that end where attention begins, and their replay around attention that runs eagerly.

Owns the cut: the model runs once, and each time it calls for attention the graph that is being captured ends and the
next begins. All graphs of a run share memory, which is right as long as they are replayed one after the other in the
order of their capture. What crosses between a graph and what runs eagerly lies in tensors of its own (`Crossings`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from kvscope_engine.model.kv_cache.kv_storage import LayerKV
from kvscope_engine.model.layers.attention.paged_attention import AttentionOptions, PagedContext

Attend = Callable[[torch.Tensor, LayerKV, AttentionOptions], torch.Tensor]
"""Queries (T, Hq, D) over a layer's stored keys and values -> (T, Hq, D)."""


class Crossings:
    """Tensors at fixed addresses that graphs of every size read and write the first rows of.

    Layers follow one another, so one tensor serves all that are alike. Made outside of graphs, when first asked for.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._held: dict[tuple[object, ...], torch.Tensor] = {}

    def rows(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """As `like`, (T, ...), in memory that stays."""
        key = (name, like.shape[1:], like.dtype)
        if key not in self._held:
            self._held[key] = like.new_zeros(self._num_rows, *like.shape[1:])
        return self._held[key][: len(like)]


@dataclass(frozen=True, slots=True)
class AttentionCut:
    """Attention between two graphs: what the first leaves for it, and where the second looks for its result."""

    query: torch.Tensor
    attended: torch.Tensor
    kv: LayerKV
    options: AttentionOptions


@dataclass(frozen=True, slots=True)
class Pieces:
    """One graph more than there are cuts."""

    graphs: list[Any] = field(default_factory=list)
    cuts: list[AttentionCut] = field(default_factory=list)

    def replay(self, context: PagedContext, num_tokens: int) -> None:
        """A step of `num_tokens`, whose attention is that of `context`; rows behind them attend to nothing."""
        for graph, cut in zip(self.graphs, self.cuts, strict=False):
            graph.replay()
            context.attend_into(cut.query[:num_tokens], cut.kv, cut.options, cut.attended[:num_tokens])
        self.graphs[-1].replay()


@dataclass(slots=True)
class CutContext(PagedContext):
    """A step's context whose keys and values are written as ever and whose attention is somebody else's."""

    attends: Attend | None = None

    def attend_written(self, query: torch.Tensor, kv: LayerKV, options: AttentionOptions) -> torch.Tensor:
        assert self.attends is not None, "made with one"
        return self.attends(query, kv, options)


class PieceRecorder:
    """Captures one run of the model; nothing is computed meanwhile, so that results are there with a replay."""

    def __init__(self, crossings: Crossings, pool: Any, stream: Any) -> None:
        """All of one `stream`, and all that share `pool`: libraries keep memory for each stream that they see."""
        self.pieces = Pieces()
        self._crossings = crossings
        self._pool = pool
        self._stream = stream
        self._is_capturing = False

    def record(self, run: Callable[[Attend], None]) -> Pieces:
        """`run` calls the model with the attention that it is given. Raises what CUDA or the model raise."""
        run(self._cut)  # outside the graphs, where libraries and crossings may allocate what they keep
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            self._is_capturing = True
            try:
                self._begin()
                run(self._cut)
            except BaseException:
                with suppress(RuntimeError):  # it only says again that the capture failed
                    self._end()
                raise
            self._end()
        return self.pieces

    def _cut(self, query: torch.Tensor, kv: LayerKV, options: AttentionOptions) -> torch.Tensor:
        rows = self._crossings.rows
        attended = query if options.latents is None else query.new_empty(*query.shape[:2], options.value_dim(query))
        cut = AttentionCut(rows("query", query), rows("attended", attended), kv, options)
        cut.query.copy_(query)
        if self._is_capturing:
            self._end()
            self.pieces.cuts.append(cut)
            self._begin()
        return cut.attended

    def _begin(self) -> None:
        self.pieces.graphs.append(torch.cuda.CUDAGraph())
        # Threads that copy beside the steps may go on meanwhile.
        self.pieces.graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        self.pieces.graphs[-1].capture_end()
