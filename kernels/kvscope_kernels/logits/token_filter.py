"""Computes the threshold of top-k, top-p and min-p for each row, which is the smallest logit that passes all filters,
by sorting.

The filters are applied in vLLM's order: min-p, then top-k, then top-p of the remaining tokens. Tokens with equal logits
are on the same side of the threshold, so that the order of equal elements in a sort does not matter. How much of a row
is sorted depends on the row's own options and logits, so its threshold does not depend on other rows.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

PIECE: Final = 256
"""Tokens per piece of the vocabulary. Sums and maxima are computed in two levels: within pieces, then over them."""
SORTED_SIZES: Final = (65, 1025)
"""Numbers of largest logits that are tried before a whole row is sorted.

They are one more than usual values of top-k, because the next logit shows whether others equal the k-th.
"""


def thresholds(logits: Tensor, weights: Tensor, options: Tensor) -> Tensor:
    """Return the smallest logit of each row that passes all filters, (n,).

    Args:
        logits: (n, vocabulary), float32, divided by the temperature.
        weights: exp(logit - the row's largest).
        options: As for `draw_tokens`.
    """
    vocabulary = logits.shape[1]
    floors = logits.amax(-1) + options[:, 3].float().log()
    result = floors.clone()
    sizes = [size for size in SORTED_SIZES if size < vocabulary] + [vocabulary]
    top_k = options[:, 1].long()
    top_k = torch.where(top_k < vocabulary, top_k, 0)
    pending = torch.nonzero((top_k > 0) | (options[:, 2] < 1.0))[:, 0]
    for size in sizes:
        row_indices = pending if size == vocabulary else pending[top_k.index_select(0, pending) < size]
        if not len(row_indices):
            continue
        rows = _Rows(
            logits.index_select(0, row_indices),
            weights.index_select(0, row_indices),
            floors.index_select(0, row_indices),
            top_k.index_select(0, row_indices),
            options[:, 2].index_select(0, row_indices),
        )
        row_thresholds, is_enough = _top_thresholds(rows, size)
        result.index_copy_(0, row_indices, row_thresholds)
        is_done = torch.zeros(len(logits), dtype=torch.bool, device=logits.device).index_copy_(
            0, row_indices, is_enough
        )
        pending = pending[~is_done.index_select(0, pending)]
    return result


class _Rows(NamedTuple):
    logits: Tensor
    weights: Tensor
    floors: Tensor
    top_k: Tensor
    """(n,) int64; 0 disables the filter."""
    top_p: Tensor
    """(n,) float64."""


def _top_thresholds(rows: _Rows, size: int) -> tuple[Tensor, Tensor]:
    """Return thresholds (n,) computed from the `size` largest logits of each row, and whether these logits were
    sufficient, (n,).
    """
    top_k = rows.top_k
    largest = rows.logits.topk(size).values
    limits = torch.maximum(rows.floors, _kth_values(largest, top_k))[:, None]
    is_kept = largest >= limits
    cumulative = ((largest - largest[:, :1]).double().exp_() * is_kept).cumsum(-1)
    wanted = rows.top_p * _totals(rows, cumulative[:, -1])
    is_reached_before = pad(cumulative, (1, -1)) >= wanted[:, None]
    last = ((is_kept & ~is_reached_before).sum(-1) - 1).clamp_(min=0)
    row_thresholds = largest.gather(-1, last[:, None])[:, 0]
    if size >= rows.logits.shape[1]:
        return row_thresholds, torch.ones_like(top_k, dtype=torch.bool)
    return row_thresholds, ~is_kept[:, -1] | ((top_k == 0) & (cumulative[:, -1] >= wanted))


def _totals(rows: _Rows, sums_of_largest: Tensor) -> Tensor:
    """Return the total weight of the tokens that pass min-p and top-k, to which top-p applies: (n,) float64."""
    if bool((rows.top_k > 0).all()):
        return sums_of_largest
    weights = rows.weights
    if bool((rows.floors > -torch.inf).any()):
        weights = weights * (rows.logits >= rows.floors[:, None])
    return torch.where(rows.top_k > 0, sums_of_largest, sums(weights))


def _kth_values(largest: Tensor, top_k: Tensor) -> Tensor:
    """Return the k-th largest logit, (n,); -inf if k is 0."""
    values = largest.gather(-1, (top_k - 1).clamp_(min=0)[:, None])[:, 0]
    return torch.where(top_k > 0, values, -torch.inf)


def in_pieces(values: Tensor, fill: float) -> Tensor:
    """Reshape (n, size) to (n, number of pieces, PIECE), padding the last piece."""
    missing = -values.shape[-1] % PIECE
    padded = pad(values, (0, missing), value=fill) if missing else values
    return padded.reshape(len(values), -1, PIECE)


def sums(values: Tensor) -> Tensor:
    """Sum rows, (n, size) -> (n,) float64. Sums within a piece are float32, which is exact enough for 250,000
    numbers.
    """
    return in_pieces(values, 0.0).sum(-1).double().sum(-1)
