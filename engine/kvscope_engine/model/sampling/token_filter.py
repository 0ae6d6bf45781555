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

from kvscope_engine.model.running.step_buffer import StepBuffer
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

PIECE: Final = 256
"""Of a vocabulary, whose sums and maxima are taken in two levels: pieces first, then what they gave."""
SORTED_SIZES: Final = (65, 1025)
"""How many of the largest logits are looked at before a whole row is sorted. One more than usual values of top-k:
whether the last of k has equals is seen by the one after it."""


def has_filter(sampling: ResolvedSampling) -> bool:
    """Whether any token may be dropped."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


@dataclass(frozen=True, slots=True)
class FilterGroup:
    """Rows of which equally many of the largest logits are looked at."""

    size: int
    is_final: bool
    """Whether nobody asks if these were enough."""
    rows: list[int]
    where: torch.Tensor
    """The same rows, (n,) int64."""
    top_k: torch.Tensor
    """(n,) int64; 0 keeps all."""
    top_p: torch.Tensor
    """(n,) float64."""


@dataclass(frozen=True, slots=True)
class FilterInputs:
    """The batch's filters as tensors."""

    log_min_p: torch.Tensor
    """(n,) float32; -inf keeps all."""
    groups: list[FilterGroup]
    """Of rows with top-k or top-p, smallest first. On a GPU those that top-k does not bound are sorted whole."""


def filter_inputs(options: Sequence[ResolvedSampling], vocab_size: int, buffer: StepBuffer) -> FilterInputs:
    """Put into `buffer`."""
    with np.errstate(divide="ignore"):
        log_min_p = np.log(np.array([option.min_p for option in options], np.float32))
    sizes = [size for size in SORTED_SIZES if size < vocab_size] + [vocab_size]
    groups = _by_size(options, sizes, is_final=buffer.is_on_device)
    return FilterInputs(
        buffer.put(log_min_p),
        [_group(size, rows, options, vocab_size, buffer) for size, rows in groups.items() if rows],
    )


def _group(
    size: int, rows: list[int], options: Sequence[ResolvedSampling], vocab_size: int, buffer: StepBuffer
) -> FilterGroup:
    return FilterGroup(
        size,
        buffer.is_on_device or size == vocab_size,
        rows,
        buffer.put(np.array(rows, np.int64)),
        buffer.put(np.array([_effective_top_k(options[row], vocab_size) for row in rows], np.int64)),
        buffer.put(np.array([options[row].top_p for row in rows], np.float64)),
    )


def thresholds(
    logits: torch.Tensor,
    weights: torch.Tensor,
    options: Sequence[ResolvedSampling],
    inputs: FilterInputs,
) -> torch.Tensor:
    """logits (n, vocabulary), float32 and divided by the temperature -> (n,): tokens at or above are kept.

    `weights` are exp(logit - the row's largest).
    """
    floors = logits.amax(-1) + inputs.log_min_p
    result = floors.clone()
    pending = list(inputs.groups)
    while pending:
        group = pending.pop(0)
        part = _Rows(
            logits.index_select(0, group.where),
            weights.index_select(0, group.where),
            floors.index_select(0, group.where),
            [options[row] for row in group.rows],
        )
        found, is_enough = _top_thresholds(part, group)
        result.index_copy_(0, group.where, found)
        if is_enough is not None:
            pending = _with_wider(pending, group, is_enough.tolist(), logits.shape[1])
    return result


def _with_wider(pending: list[FilterGroup], group: FilterGroup, is_enough: list[bool], vocab: int) -> list[FilterGroup]:
    """Rows that need a longer look, each in a group of the next size."""
    left = torch.tensor([index for index, enough in enumerate(is_enough) if not enough], dtype=torch.int64)
    if not len(left):
        return pending
    size = next((size for size in SORTED_SIZES if group.size < size < vocab), vocab)
    rows = [group.rows[index] for index in left.tolist()]
    return [*pending, FilterGroup(size, size == vocab, rows, group.where[left], group.top_k[left], group.top_p[left])]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are looked at together."""

    logits: torch.Tensor
    weights: torch.Tensor
    floors: torch.Tensor
    options: list[ResolvedSampling]


def _by_size(options: Sequence[ResolvedSampling], sizes: list[int], *, is_final: bool) -> dict[int, list[int]]:
    """Rows with top-k or top-p by how many of their largest logits are looked at, first or (`is_final`) at all."""
    groups: dict[int, list[int]] = {size: [] for size in sizes}
    for row, option in enumerate(options):
        top_k = _effective_top_k(option, sizes[-1])
        if top_k or option.top_p < 1.0:
            whole = is_final and not top_k
            groups[sizes[-1] if whole else next(size for size in sizes if top_k < size)].append(row)
    return groups


def _top_thresholds(rows: _Rows, group: FilterGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Thresholds (n,) from the largest logits of each row, and (n,) whether those were enough to know.

    None: they are. On a GPU, where asking would mean waiting: all that lies beyond equals the last of top-k, and
    a threshold keeps equals; their weight is in the sum over the whole row.
    """
    top_k, size = group.top_k, group.size
    is_whole = size >= rows.logits.shape[1]
    largest = rows.logits.topk(size).values
    limits = torch.maximum(rows.floors, _kth_values(largest, top_k))[:, None]
    kept = largest >= limits
    cumulative = ((largest - largest[:, :1]).double().exp_() * kept).cumsum(-1)
    is_partial = group.is_final and not is_whole
    total = sums(rows.weights * (rows.logits >= limits)) if is_partial else _totals(rows, cumulative[:, -1], top_k)
    wanted = group.top_p * total
    is_reached_before = pad(cumulative, (1, -1)) >= wanted[:, None]
    last = ((kept & ~is_reached_before).sum(-1) - 1).clamp_(min=0)
    found = largest.gather(-1, last[:, None])[:, 0]
    if group.is_final:
        return found, None
    return found, ~kept[:, -1] | ((top_k == 0) & (cumulative[:, -1] >= wanted))


def _totals(rows: _Rows, sums_of_largest: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """(n,) float64, the weight of all that min-p and top-k leave: what top-p is a share of."""
    weights = rows.weights
    if all(_effective_top_k(option, weights.shape[1]) for option in rows.options):
        return sums_of_largest
    if any(option.min_p for option in rows.options):
        weights = weights * (rows.logits >= rows.floors[:, None])
    return torch.where(top_k > 0, sums_of_largest, sums(weights))


def _kth_values(largest: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """(n,): the k-th largest logit; -inf where k is 0."""
    values = largest.gather(-1, (top_k - 1).clamp_(min=0)[:, None])[:, 0]
    return torch.where(top_k > 0, values, -torch.inf)


def _effective_top_k(option: ResolvedSampling, vocabulary: int) -> int:
    """0 when nothing is dropped by it."""
    return option.top_k if 0 < option.top_k < vocabulary else 0


def in_pieces(values: torch.Tensor, fill: float) -> torch.Tensor:
    """(n, size) -> (n, number of pieces, PIECE), the last one filled up."""
    missing = -values.shape[-1] % PIECE
    padded = pad(values, (0, missing), value=fill) if missing else values
    return padded.reshape(len(values), -1, PIECE)


def sums(values: torch.Tensor) -> torch.Tensor:
    """(n, size) -> (n,) float64: float32 within a piece, float64 over pieces, exact enough for 250,000 numbers."""
    return in_pieces(values, 0.0).sum(-1).double().sum(-1)
