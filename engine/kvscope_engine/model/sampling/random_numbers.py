"""Random numbers by counter: one uniform number for a seed and a position, whatever else is drawn.

Owns the hash. A request's numbers depend on nothing but its seed and how far it is, so a batch, its order and a
preemption cannot change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2: Final = np.uint64(0x94D049BB133111EB)
_MASK: Final = (1 << 64) - 1


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number from [0, 1) for each pair, with 53 random bits. Seeds are any integers, taken modulo 2^64.

    Each seed, mixed, starts a SplitMix64 sequence; the position is how far along it.
    """
    keys = _as_uint64(seeds)
    counters = _as_uint64(positions)
    with np.errstate(over="ignore"):
        bits = _mix(_mix(keys + _GOLDEN) + (counters + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _as_uint64(values: Sequence[int]) -> UInt64:
    return np.fromiter((value & _MASK for value in values), np.uint64, len(values))


def _mix(state: UInt64) -> UInt64:
    """The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))
