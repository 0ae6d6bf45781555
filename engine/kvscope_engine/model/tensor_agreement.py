"""Measures how far two results differ; the only place where the checks at load read what a device computed.

Owns the measures, each a share of what was expected. NaN where either holds one, which no bound accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

TOLERANCE: Final = {torch.float32: 1e-4, torch.float64: 1e-4}
LOW_PRECISION_TOLERANCE: Final = 2e-2
ROW_FLOOR = 0.1
"""A row much smaller than the others is measured against this share of their size: what is left after terms cancel
is rounding."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two tensors of the same shape, rows first."""

    overall: float
    """Root mean square of the difference, as a share of what was expected."""
    worst_row: float
    """The same of the row that differs most."""
    three_quarters: float
    """What three rows in four stay below: a token that went to another expert is another token, and no fault."""

    @property
    def is_number(self) -> bool:
        """Whether there was no NaN."""
        return self.overall == self.overall and self.worst_row == self.worst_row


def difference(actual: torch.Tensor, expected: torch.Tensor) -> Difference:
    """(rows, ...) and the same -> how far they are apart."""
    wide = expected.float().flatten(1)
    error = (actual.float().flatten(1) - wide).square().mean(1)
    size = wide.square().mean(1)
    overall = (error.mean() / size.mean().clamp_min(1e-30)).sqrt()
    rows = error.sqrt() / torch.maximum(size.sqrt(), ROW_FLOOR * size.mean().sqrt()).clamp_min(1e-15)
    ordered = rows.sort().values
    found = torch.stack((overall, rows.amax(), ordered[(3 * len(ordered)) // 4])).tolist()
    return Difference(*found)


def share_of_spread(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of `expected`."""
    error = (actual.float() - expected.float()).square().mean().sqrt()
    size = expected.float().square().mean().sqrt()
    apart = float(error)
    return 0.0 if apart == 0.0 else apart / max(float(size), 1e-30)


def close(actual: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Whether two results are equal but for rounding: tensors, None, or tuples of them.

    `tolerance` is the root mean square of the difference over that of `expected`; by default it fits the type.
    """
    if isinstance(expected, tuple | list):
        same_length = isinstance(actual, tuple | list) and len(actual) == len(expected)
        return same_length and all(close(a, e, tolerance) for a, e in zip(actual, expected, strict=True))
    if not isinstance(expected, torch.Tensor):
        return type(actual) is type(expected)
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    tolerance = TOLERANCE.get(expected.dtype, LOW_PRECISION_TOLERANCE) if tolerance is None else tolerance
    return share_of_spread(actual, expected) <= tolerance
