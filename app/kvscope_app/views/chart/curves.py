"""Prepares curves for plotting: trailing means, min/max decimation, gaps. Imports no Qt.

NaN means unknown: it survives means and decimation, and no line is drawn to it.

See docs/internals/decisions/0010-curves-are-decimated-before-qt.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def trailing_mean(values: FloatArray, width: int) -> FloatArray:
    """Return the mean of each value and the `width - 1` values before it, shape (n,).

    Unknown values are excluded from the means, and stay NaN themselves.
    """
    if width <= 1 or not values.size:
        return values
    is_known = np.isfinite(values)
    sums = np.cumsum(np.where(is_known, values, 0.0))
    counts = np.cumsum(is_known)
    sums[width:] -= sums[:-width].copy()
    counts[width:] -= counts[:-width].copy()
    return np.where(is_known, sums / np.maximum(counts, 1), np.nan)


def decimate(x: FloatArray, y: FloatArray, max_columns: int, phase: int = 0) -> tuple[FloatArray, FloatArray]:
    """Return a curve of at most `max_columns` columns with two points each, the minimum and the maximum.

    `phase` is the index of the first point in the whole series. It keeps the groups of points stable as the window
    moves; otherwise the curve would flicker.
    """
    factor = -(-y.size // max(max_columns, 1))
    if factor <= 1:
        return x, y
    num_leading = phase % factor
    num_trailing = -(num_leading + y.size) % factor
    columns = np.pad(y, (num_leading, num_trailing), constant_values=np.nan).reshape(-1, factor)
    times = np.pad(x, (num_leading, num_trailing), mode="edge").reshape(-1, factor)
    pairs = np.stack((np.fmin.reduce(columns, axis=1), np.fmax.reduce(columns, axis=1)), axis=1)
    return times[:, (0, -1)].ravel(), pairs.ravel()


def join_near(x: FloatArray, y: FloatArray, max_gap: float) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """Return the times and values of the known points, shape (m,) each, and whether a line joins each point to the next
    one.

    A line joins two points that are at most `max_gap` apart.
    """
    is_known = np.isfinite(y)
    x, y = x[is_known], y[is_known]
    is_joined = np.zeros(x.size, bool)
    is_joined[:-1] = np.diff(x) <= max_gap
    return x, y, is_joined


def close_areas(
    x: FloatArray, y: FloatArray, is_joined: npt.NDArray[np.bool_], floor: float = 0.0
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """Return the curve with a drop to `floor` on both sides of each gap, so that a filled area also ends there.

    Choose a floor below the visible range, so that the line at the floor is hidden: the value in a gap is unknown, not
    0.
    """
    gap_starts = np.flatnonzero(~is_joined[:-1])
    positions = np.repeat(gap_starts + 1, 2)
    edges = np.stack((x[gap_starts], x[gap_starts + 1]), axis=1).ravel()
    closed = np.insert(x, positions, edges), np.insert(y, positions, floor)
    return *closed, np.arange(x.size + positions.size) < x.size + positions.size - 1


def gaps(x: FloatArray, is_known: npt.NDArray[np.bool_], patience: float) -> list[tuple[float, float]]:
    """Return the ranges of `x` without known values, after the first known value.

    A range that reaches the end counts only if it is longer than `patience`, because its data may still arrive.
    """
    is_known = is_known | ~np.logical_or.accumulate(is_known)
    edges = np.flatnonzero(np.diff(np.concatenate(([True], is_known, [True])).astype(np.int8)))
    last = x.size - 1
    ranges = [
        (float(x[max(start - 1, 0)]), float(x[min(stop, last)]))
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]
    return [gap for gap in ranges if gap[1] < x[last] or gap[1] - gap[0] > patience]


def nearest(x: FloatArray, at: float) -> float:
    """Return the value in `x` closest to `at`, or `at` itself if it is beyond either end by more than the spacing.

    `x` has shape (n,) and is ascending and evenly spaced.
    """
    if x.size < 2 or not 2 * x[0] - x[1] <= at <= 2 * x[-1] - x[-2]:
        return at
    return float(x[nearest_index(x, at)])


def nearest_index(x: FloatArray, at: float) -> int:
    """Return the index of the value in `x` closest to `at`. `x` has shape (n,), n > 0, and is ascending."""
    after = min(int(np.searchsorted(x, at)), x.size - 1)
    return after - 1 if after > 0 and at - x[after - 1] < x[after] - at else after


def nice_ceiling(value: float) -> float:
    """Return the smallest number of the form 1, 2, 3, 4, 5, 6, 8 or 10 times a power of ten that is at least `value`.

    Returns 1.0 if `value` is not positive and finite.
    """
    if not np.isfinite(value) or value <= 0:
        return 1.0
    scale = 10.0 ** np.floor(np.log10(value))
    return float(next(step * scale for step in (1, 2, 3, 4, 5, 6, 8, 10) if step * scale >= value * (1 - 1e-9)))
