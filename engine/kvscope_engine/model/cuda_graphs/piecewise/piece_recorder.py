"""Captures a model as a sequence of graphs that end where attention begins, and replays them around eager attention.

The model runs once; at each call of attention, the current capture ends and the next begins. All graphs of a run share
memory, which is correct as long as they are replayed consecutively in the order of capture. Tensors passed between a
graph and eager code are outside that memory (`Crossings`).
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
"""Computes attention of queries (T, Hq, D) over a layer's stored keys and values. Returns (T, Hq, D)."""


class Crossings:
    """Tensors at fixed addresses that pass data between CUDA graphs and eager code. A graph for T tokens uses the first
    T rows.

    Layers run in sequence, so all layers share the tensors of the same name and shape. They are allocated outside of
    graphs, when first requested.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}

    def rows(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `like`, (T, ...), at a fixed address."""
        key = (name, like.shape[1:], like.dtype)
        if key not in self._buffers:
            self._buffers[key] = like.new_zeros(self._num_rows, *like.shape[1:])
        return self._buffers[key][: len(like)]


@dataclass(frozen=True, slots=True)
class AttentionCut:
    """Attention between two graphs: the first graph writes `query`, attention runs eagerly, and the second reads
    `attended`.
    """

    query: torch.Tensor
    attended: torch.Tensor
    kv: LayerKV
    options: AttentionOptions


@dataclass(frozen=True, slots=True)
class GraphSequence:
    """CUDA graphs and the eager attention calls between them. There is one graph more than attention calls."""

    graphs: list[Any] = field(default_factory=list)
    cuts: list[AttentionCut] = field(default_factory=list)

    def replay(self, context: PagedContext, num_tokens: int) -> None:
        """Run a step of `num_tokens` with the attention of `context`. Padding rows attend to nothing."""
        for graph, cut in zip(self.graphs, self.cuts, strict=False):
            graph.replay()
            context.attend_into(cut.query[:num_tokens], cut.kv, cut.options, cut.attended[:num_tokens])
        self.graphs[-1].replay()


@dataclass(slots=True)
class CutContext(PagedContext):
    """Step context that writes keys and values as usual and delegates attention to `attend_function`."""

    attend_function: Attend | None = None

    def attend_written(self, query: torch.Tensor, kv: LayerKV, options: AttentionOptions) -> torch.Tensor:
        assert self.attend_function is not None, "made with one"
        return self.attend_function(query, kv, options)


class PieceRecorder:
    """Captures one run of the model. Nothing is computed while capturing; results exist only after a replay."""

    def __init__(self, static_buffers: Crossings, pool: Any, stream: Any) -> None:
        """Create a recorder. All recorders that share `pool` must use the same `stream`, because libraries allocate a
        workspace per stream.
        """
        self.sequence = GraphSequence()
        self._crossings = static_buffers
        self._pool = pool
        self._stream = stream
        self._is_capturing = False

    def record(self, run: Callable[[Attend], None]) -> GraphSequence:
        """Capture `run`, which must call the model with the given attention. Exceptions of CUDA or the model
        propagate.
        """
        run(self._cut)  # outside the graphs, so that libraries and crossings can allocate permanent memory
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            self._is_capturing = True
            try:
                self._begin_capture()
                run(self._cut)
            except BaseException:
                with suppress(RuntimeError):  # this error only repeats that the capture failed
                    self._end_capture()
                raise
            self._end_capture()
        return self.sequence

    def _cut(self, query: torch.Tensor, kv: LayerKV, options: AttentionOptions) -> torch.Tensor:
        rows = self._crossings.rows
        attended = query if options.latents is None else query.new_empty(*query.shape[:2], options.value_dim(query))
        cut = AttentionCut(rows("query", query), rows("attended", attended), kv, options)
        cut.query.copy_(query)
        if self._is_capturing:
            self._end_capture()
            self.sequence.cuts.append(cut)
            self._begin_capture()
        return cut.attended

    def _begin_capture(self) -> None:
        self.sequence.graphs.append(torch.cuda.CUDAGraph())
        # "thread_local" lets copy threads continue.
        self.sequence.graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end_capture(self) -> None:
        self.sequence.graphs[-1].capture_end()
