"""Options of a model runner, without a dependency on the engine's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Options of a `ModelRunner`. Options without a docstring have the meaning of those with the same name in
    `EngineConfig`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_drafts: int = 0
    """Maximum number of draft tokens per request."""
    enforce_eager: bool = False
    piecewise_graphs: bool = False
    """Whether steps with prefills replay CUDA graphs between their attention calls."""
    shares_graphs: bool = False
    """Whether all ranks of tensor parallelism capture and replay the same CUDA graphs together."""
    page_heat: int = 0
    """Interval, in steps with decodes, at which attention per block is measured; 0 to never measure it."""
    sparse_decode: float | None = None
    """Fraction of its blocks that a decode attends to (sparse attention); None for all blocks."""
    tile_sizes: Sequence[int] = ()
    """Sizes in tokens of the fixed tiles in which steps run, for results that do not depend on the batch; empty for no
    tiles.

    The first size is the one that most tiles have.
    """
    fingerprints: bool = False
    """Whether to compute a checksum of the logits of each sampled row."""
