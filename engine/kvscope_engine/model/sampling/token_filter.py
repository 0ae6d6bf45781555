"""Which tokens top-k, top-p and min-p leave: for each row the smallest logit that is kept.

Owns the rules, in vLLM's order (min-p, then top-k, then top-p of what is left). A threshold keeps all tokens of
equal logit, so that nothing depends on how a sort orders equals. How much of a row is sorted follows from its own
options and logits, so a row's threshold does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch.nn.functional import pad

from kvscope_engine.model.sampling.vocabulary_pieces import sums
from kvscope_telemetry.messages.sampling_params import SamplingParams

SORTED_SIZES: Final = (65, 1025)
"""How many of the largest logits are looked at before a whole row is sorted. One more than usual values of top-k:
whether the last of k has equals is seen by the one after it."""


def has_filter(sampling: SamplingParams) -> bool:
    """Whether any token may be dropped."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def thresholds(logits: torch.Tensor, weights: torch.Tensor, options: Sequence[SamplingParams]) -> torch.Tensor:
    """logits (n, vocabulary), float32 and divided by the temperature -> (n,): tokens at or above are kept.

    `weights` are exp(logit - the row's largest).
    """
    vocabulary = logits.shape[1]
    floors = _min_p_floors(logits, options)
    result = floors.clone()
    sizes = [size for size in SORTED_SIZES if size < vocabulary] + [vocabulary]
    groups = _by_size(options, sizes)
    for size, wider in zip(sizes, [*sizes[1:], vocabulary], strict=True):
        rows = groups[size]
        if rows:
            where = torch.tensor(rows, device=logits.device)
            part = _Rows(logits[where], weights[where], floors[where], [options[row] for row in rows])
            found, is_enough = _top_thresholds(part, size)
            result[where] = found
            if size < vocabulary:
                groups[wider] += [row for row, enough in zip(rows, is_enough.tolist(), strict=True) if not enough]
    return result


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are looked at together."""

    logits: torch.Tensor
    weights: torch.Tensor
    floors: torch.Tensor
    options: list[SamplingParams]


def _min_p_floors(logits: torch.Tensor, options: Sequence[SamplingParams]) -> torch.Tensor:
    """The largest logit plus log(min_p); without min-p -inf, which keeps all."""
    with np.errstate(divide="ignore"):
        shares = np.log(np.array([option.min_p for option in options], np.float32))
    return logits.amax(-1) + torch.from_numpy(shares).to(logits.device)


def _by_size(options: Sequence[SamplingParams], sizes: list[int]) -> dict[int, list[int]]:
    """Rows with top-k or top-p by how many of their largest logits are looked at first."""
    groups: dict[int, list[int]] = {size: [] for size in sizes}
    for row, option in enumerate(options):
        top_k = _effective_top_k(option, sizes[-1])
        if top_k or option.top_p < 1.0:
            groups[next(size for size in sizes if top_k < size)].append(row)
    return groups


def _top_thresholds(rows: _Rows, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds (n,) from the `size` largest logits of each row, and (n,) whether those were enough to know."""
    top_k = torch.tensor([_effective_top_k(option, rows.logits.shape[1]) for option in rows.options])
    top_k = top_k.to(rows.logits.device)
    largest = rows.logits.topk(size).values
    kept = largest >= torch.maximum(rows.floors, _kth_values(largest, top_k))[:, None]
    cumulative = ((largest - largest[:, :1]).double().exp_() * kept).cumsum(-1)
    total = cumulative[:, -1] if bool((top_k > 0).all()) else _totals(rows, cumulative[:, -1], top_k)
    wanted = torch.tensor([o.top_p for o in rows.options], dtype=torch.float64, device=total.device) * total
    is_reached_before = pad(cumulative, (1, -1)) >= wanted[:, None]
    last = ((kept & ~is_reached_before).sum(-1) - 1).clamp_(min=0)
    is_enough = ~kept[:, -1] | ((top_k == 0) & (cumulative[:, -1] >= wanted))
    return largest.gather(-1, last[:, None])[:, 0], is_enough


def _totals(rows: _Rows, sums_of_largest: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """(n,) float64, the weight of all that min-p and top-k leave: what top-p is a share of."""
    weights = rows.weights
    if any(option.min_p for option in rows.options):
        weights = weights * (rows.logits >= rows.floors[:, None])
    return torch.where(top_k > 0, sums_of_largest, sums(weights))


def _kth_values(largest: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """(n,): the k-th largest logit; -inf where k is 0."""
    values = largest.gather(-1, (top_k - 1).clamp_(min=0)[:, None])[:, 0]
    return torch.where(top_k > 0, values, -torch.inf)


def _effective_top_k(option: SamplingParams, vocabulary: int) -> int:
    """0 when nothing is dropped by it."""
    return option.top_k if 0 < option.top_k < vocabulary else 0
