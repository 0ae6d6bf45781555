"""Drawing one token a row from weights, by inverse of the cumulative sum in the order of token ids.

Owns nothing but arithmetic. A row's result depends on its own weights and number alone.
"""

from __future__ import annotations

import torch

from kvscope_engine.model.sampling.vocabulary_pieces import PIECE, in_pieces


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """weights (n, size) >= 0 and not all zero in a row, uniforms (n,) float64 in [0, 1) -> indices (n,).

    An index of weight zero is never drawn.
    """
    pieces = in_pieces(weights, 0.0)
    totals = pieces.sum(-1).double().cumsum(-1)
    target = uniforms * totals[:, -1]
    piece = _first_above(totals, target)
    rows = torch.arange(len(weights), device=weights.device)
    before = torch.where(piece > 0, totals[rows, piece - 1], 0.0)
    inside = pieces[rows, piece].double().cumsum(-1)
    return piece * PIECE + _first_above(inside, target - before)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(n, size), (n,) -> (n,): the first index above the target; when rounding left none, the last that adds."""
    index = (cumulative <= target[:, None]).sum(-1)
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    return torch.minimum(index, last)
