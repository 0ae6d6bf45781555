"""Counter-based random numbers that are determined by a seed and a position only.

A request's numbers depend on its seed and its number of output tokens, so they do not change with the batch, its order,
or preemption. Seeds and positions are mixed on the host for each request, counters on the device for each number.
Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014 (SplitMix64).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2: Final = np.uint64(0x94D049BB133111EB)
_MASK: Final = (1 << 64) - 1


def keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.int64]:
    """Return a 64-bit key for each (seed, position), from which its random numbers are computed. Seeds are any
    integers, taken modulo 2^64.

    Each mixed seed starts a SplitMix64 sequence, in which the position is the index.
    """
    starts = _as_uint64(seeds)
    counters = _as_uint64(positions)
    with np.errstate(over="ignore"):
        return _mix(_mix(starts + _GOLDEN) + (counters + np.uint64(1)) * _GOLDEN).view(np.int64)


def exponentials(keys: Tensor, count: int) -> Tensor:
    """Return random numbers distributed as Exp(1), above 0: keys (n,) int64 -> (n, count) float64.

    They are computed from 53 bits of the SplitMix64 sequences that start at the keys.
    """
    counters = torch.arange(1, count + 1, device=keys.device).mul_(_signed(_GOLDEN))
    state = keys[:, None] + counters
    shifted = torch.empty_like(state)
    for shift, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2), (31, None)):
        torch.bitwise_right_shift(state, shift, out=shifted)
        state.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))  # arithmetic shift: clear the sign bits
        if multiplier is not None:
            state.mul_(_signed(multiplier))
    uniforms = state.bitwise_and_((1 << 53) - 1).double().add_(0.5)
    return uniforms.mul_(-(2.0**-53)).log1p_().neg_()


def _as_uint64(values: Sequence[int]) -> NDArray[np.uint64]:
    return np.fromiter((value & _MASK for value in values), np.uint64, len(values))


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))


def _signed(value: np.uint64) -> int:
    return int(value.astype(np.int64))
