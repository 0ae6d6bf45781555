"""Reductions over a vocabulary in two levels: pieces first, then what they gave.

Owns the piece size. On a CPU this is several times faster than torch's own `argmax`, and sums of 250,000 numbers
stay exact enough: float32 within a piece, float64 over pieces.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import pad

PIECE: Final = 256


def in_pieces(values: torch.Tensor, fill: float) -> torch.Tensor:
    """(n, size) -> (n, number of pieces, PIECE), the last one filled up."""
    missing = -values.shape[-1] % PIECE
    padded = pad(values, (0, missing), value=fill) if missing else values
    return padded.reshape(len(values), -1, PIECE)


def first_largest(values: torch.Tensor) -> torch.Tensor:
    """(n, size) -> (n,): index of the largest, the first of equals."""
    pieces = in_pieces(values, -torch.inf)
    piece = pieces.amax(-1).argmax(-1)
    rows = torch.arange(len(values), device=values.device)
    return piece * PIECE + pieces[rows, piece].argmax(-1)


def sums(values: torch.Tensor) -> torch.Tensor:
    """(n, size) -> (n,) float64."""
    return in_pieces(values, 0.0).sum(-1).double().sum(-1)
