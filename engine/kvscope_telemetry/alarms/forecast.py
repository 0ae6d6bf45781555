"""Forecasts when free and cached blocks run out, by a robust slope over the last seconds. Noise gives no forecast.

Cached blocks count as free because they are evicted when a request needs them. Must not depend on anything but numpy.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
WINDOW_S: Final = 15
"""Maximum number of latest samples (one per second) to which the slope is fitted."""
MIN_SAMPLES: Final = 8
MAX_FORECAST_S: Final = 600.0
_MIN_FALL_SHARE: Final = 0.02
"""Minimum fall within the window for a forecast, as a fraction of the pool."""
_MIN_FALL_TO_NOISE: Final = 3.0
_MIN_HALF_SLOPE_SHARE: Final = 0.3
"""Minimum slope of each half of the window, as a fraction of the slope of the whole window. Excludes a single
drop and a fall that has ended.
"""
_MAX_GAP_S: Final = 2.5


def seconds_left(time_s: FloatArray, free_blocks: FloatArray, num_blocks: float) -> float | None:
    """Return the seconds until no free or cached block is left. Returns None if the number of these blocks does not
    clearly fall, or if the result would exceed `MAX_FORECAST_S`.

    The slope is the median of the slopes between all pairs of samples (Theil 1950, Sen 1968), so that a request that
    starts or finishes is an outlier and does not change the trend.

    Args:
        time_s: Ascending times of the samples in seconds, shape (n,).
        free_blocks: Number of free and cached blocks at these times, shape (n,).
        num_blocks: Total number of blocks in the pool.
    """
    time_s, free_blocks = time_s[-WINDOW_S:], free_blocks[-WINDOW_S:]
    if time_s.size < MIN_SAMPLES or np.diff(time_s).max() > _MAX_GAP_S or not np.isfinite(free_blocks).all():
        return None
    if (free_blocks == free_blocks[0]).all():
        return None
    slope, half = _slope(time_s, free_blocks), time_s.size // 2
    if free_blocks[-1] <= 0 or slope >= 0:
        return None
    if (
        max(_slope(time_s[:half], free_blocks[:half]), _slope(time_s[half:], free_blocks[half:]))
        > _MIN_HALF_SLOPE_SHARE * slope
    ):
        return None
    fall = -slope * float(time_s[-1] - time_s[0])
    residuals = free_blocks - slope * time_s
    noise = float(np.std(residuals))
    if fall < max(_MIN_FALL_SHARE * num_blocks, 1.0) or fall < _MIN_FALL_TO_NOISE * noise:
        return None
    left_s = float(free_blocks[-1]) / -slope
    return left_s if left_s <= MAX_FORECAST_S else None


def _slope(time_s: FloatArray, free_blocks: FloatArray) -> float:
    first, second = np.triu_indices(time_s.size, 1)
    return float(np.median((free_blocks[second] - free_blocks[first]) / (time_s[second] - time_s[first])))
