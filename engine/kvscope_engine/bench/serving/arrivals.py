"""When each request is sent, in seconds from the start: as vLLM's client has it. Pure."""

from __future__ import annotations

import math

import numpy as np


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """All at once for an infinite `rate`, else with gaps of a gamma distribution whose shape is `burstiness`.

    1 is a Poisson process, less comes in bursts, more is more even, infinite is a beat. The last comes at
    `count / rate` exactly, so that seeds differ in order and not in load.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.ones(count) if math.isinf(burstiness) else np.random.default_rng(seed).gamma(burstiness, 1.0, count)
    ends = np.cumsum(gaps)
    return [float(end) for end in ends * (count / rate / ends[-1])]
