"""Measures the difference between a result and the expected result, for the checks at load.

Each measure is relative to the expected result. It is NaN if either result contains NaN, and NaN fails every bound. In
the checks at load, only these functions copy numbers to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

TOLERANCE: Final = {torch.float32: 1e-4, torch.float64: 1e-4}
LOW_PRECISION_TOLERANCE: Final = 2e-2
ROW_FLOOR = 0.1
"""Lower limit of the norm by which a row's error is divided, as a fraction of the root mean square of all rows' norms.

A much smaller row is what remains after large terms cancel, so its error is rounding.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences of two tensors of shape (rows, ...), relative to the expected one."""

    overall: float
    """Root mean square of the difference, divided by the root mean square of the expected result."""
    worst_row: float
    """Relative difference of the row that differs most."""
    upper_quartile: float
    """Upper quartile of the rows' relative differences.

    A few tokens that were routed to another expert, which is not an error, do not affect it.
    """

    @property
    def is_number(self) -> bool:
        """Whether neither `overall` nor `worst_row` is NaN."""
        return self.overall == self.overall and self.worst_row == self.worst_row


def difference(actual: torch.Tensor, expected: torch.Tensor) -> Difference:
    """Return how far two tensors of shape (rows, ...) differ."""
    wide = expected.float().flatten(1)
    error = (actual.float().flatten(1) - wide).square().mean(1)
    size = wide.square().mean(1)
    overall = (error.mean() / size.mean().clamp_min(1e-30)).sqrt()
    rows = error.sqrt() / torch.maximum(size.sqrt(), ROW_FLOOR * size.mean().sqrt()).clamp_min(1e-15)
    ordered = rows.sort().values
    measures = torch.stack((overall, rows.amax(), ordered[(3 * len(ordered)) // 4])).tolist()
    return Difference(*measures)


def relative_rms_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of the difference divided by the root mean square of `expected`."""
    error = (actual.float() - expected.float()).square().mean().sqrt()
    size = expected.float().square().mean().sqrt()
    error_rms = float(error)
    return 0.0 if error_rms == 0.0 else error_rms / max(float(size), 1e-30)


def is_close(actual: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Whether two results (tensors, None, or tuples of them) are equal except for rounding.

    `tolerance` limits `relative_rms_error`; the default depends on the dtype.
    """
    if isinstance(expected, tuple | list):
        same_length = isinstance(actual, tuple | list) and len(actual) == len(expected)
        return same_length and all(is_close(a, e, tolerance) for a, e in zip(actual, expected, strict=True))
    if not isinstance(expected, torch.Tensor):
        return type(actual) is type(expected)
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    tolerance = TOLERANCE.get(expected.dtype, LOW_PRECISION_TOLERANCE) if tolerance is None else tolerance
    return relative_rms_error(actual, expected) <= tolerance
