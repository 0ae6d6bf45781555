"""Random numbers by counter: those of a seed and a position, whatever else is drawn.

A request's numbers depend on nothing but its seed and how far it is, so a batch, its order and a preemption cannot
change them. Whole numbers are mixed on the host for each request, and on the device for each number
(`kvscope_kernels.logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvscope_kernels.logits.random_numbers import GOLDEN, MULTIPLIER_1, MULTIPLIER_2

UInt64 = NDArray[np.uint64]
_GOLDEN: Final = np.uint64(GOLDEN)
_MULTIPLIER_1: Final = np.uint64(MULTIPLIER_1)
_MULTIPLIER_2: Final = np.uint64(MULTIPLIER_2)
_MASK: Final = (1 << 64) - 1


def keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.int64]:
    """One for each pair: what its random numbers begin with. Seeds are any integers, taken modulo 2^64.

    Each seed, mixed, starts a SplitMix64 sequence; the position is how far along it.
    """
    starts = _as_uint64(seeds)
    counters = _as_uint64(positions)
    with np.errstate(over="ignore"):
        return _mix(_mix(starts + _GOLDEN) + (counters + np.uint64(1)) * _GOLDEN).view(np.int64)


def _as_uint64(values: Sequence[int]) -> UInt64:
    return np.fromiter((value & _MASK for value in values), np.uint64, len(values))


def _mix(state: UInt64) -> UInt64:
    """The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))
