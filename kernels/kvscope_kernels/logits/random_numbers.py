"""Random numbers by counter: those of a key, whatever else is drawn."""

from typing import Final

import torch
from torch import Tensor

GOLDEN: Final = 0x9E3779B97F4A7C15
MULTIPLIER_1: Final = 0xBF58476D1CE4E5B9
MULTIPLIER_2: Final = 0x94D049BB133111EB


def exponentials(keys: Tensor, count: int) -> Tensor:
    """keys (n,) int64 -> (n, count) float64, each distributed as Exp(1), above 0: of the SplitMix64 sequence that a key
    starts, with 53 random bits. Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014."""
    counters = torch.arange(1, count + 1, device=keys.device).mul_(_signed(GOLDEN))
    state = keys[:, None] + counters
    spare = torch.empty_like(state)
    for shift, multiplier in ((30, MULTIPLIER_1), (27, MULTIPLIER_2), (31, None)):
        torch.bitwise_right_shift(state, shift, out=spare)
        state.bitwise_xor_(spare.bitwise_and_((1 << (64 - shift)) - 1))  # the shift brought the sign along
        if multiplier is not None:
            state.mul_(_signed(multiplier))
    uniforms = state.bitwise_and_((1 << 53) - 1).double().add_(0.5)
    return uniforms.mul_(-(2.0**-53)).log1p_().neg_()


def _signed(value: int) -> int:
    return value - (1 << 64)
