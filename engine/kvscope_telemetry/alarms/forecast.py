"""Forecasts when the blocks that nobody holds run out at the present rate: a robust slope over some seconds, and no
guess from noise.

Cached blocks count as free: they are evicted when a request needs them. Knows numbers alone.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
WINDOW_S: Final = 15
"""So many seconds are looked at, at most."""
LEAST_S: Final = 8
LONGEST_S: Final = 600.0
"""What is further away is no forecast."""
_LEAST_SHARE: Final = 0.02
"""Of the pool: less of a fall in the window is nothing."""
_CLEARER_THAN_NOISE: Final = 3.0
_LEAST_OF_A_HALF: Final = 0.3
"""Of the slope of all: what fell once, or no longer falls, is not going."""
_LARGEST_GAP_S: Final = 2.5


def seconds_left(time_s: FloatArray, room: FloatArray, num_blocks: float) -> float | None:
    """Until `room`, the blocks nobody holds at the times `time_s` (ascending, shape (n,) each), of a pool of
    `num_blocks`, is 0; None where it does not fall, or not clearly.

    The slope is the median of those between all pairs of seconds (Theil 1950, Sen 1968): a request that ends or begins
    is a jump and no slope.
    """
    time_s, room = time_s[-WINDOW_S:], room[-WINDOW_S:]
    if time_s.size < LEAST_S or np.diff(time_s).max() > _LARGEST_GAP_S or not np.isfinite(room).all():
        return None
    if (room == room[0]).all():
        return None
    slope, half = _slope(time_s, room), time_s.size // 2
    if room[-1] <= 0 or slope >= 0:
        return None
    if max(_slope(time_s[:half], room[:half]), _slope(time_s[half:], room[half:])) > _LEAST_OF_A_HALF * slope:
        return None
    fall = -slope * float(time_s[-1] - time_s[0])
    rest = room - slope * time_s
    noise = float(np.std(rest))
    if fall < max(_LEAST_SHARE * num_blocks, 1.0) or fall < _CLEARER_THAN_NOISE * noise:
        return None
    left_s = float(room[-1]) / -slope
    return left_s if left_s <= LONGEST_S else None


def _slope(time_s: FloatArray, room: FloatArray) -> float:
    first, second = np.triu_indices(time_s.size, 1)
    return float(np.median((room[second] - room[first]) / (time_s[second] - time_s[first])))
