"""Steps as points of a roofline: FLOP per byte against FLOP per second. Imports no Qt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.views.timeline.steps import NO_STEPS, StepColumns

FloatArray = npt.NDArray[np.float64]


class PointKind(IntEnum):
    DECODE = 0
    MIXED = 1
    PREFILL = 2


@dataclass(frozen=True, slots=True)
class RooflinePoints:
    """Points of the steps with reported work, oldest first. All arrays have shape (n,)."""

    steps: StepColumns
    step_index: npt.NDArray[np.int64]
    """Index of each point's step in `steps`."""
    intensity: FloatArray
    """Arithmetic intensity in FLOP per byte."""
    flops_per_s: FloatArray
    kind: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return self.step_index.size

    @property
    def bytes_per_s(self) -> FloatArray:
        """Memory traffic of each step in bytes per second, shape (n,)."""
        rate: FloatArray = self.flops_per_s / self.intensity
        return rate

    def index_of_step(self, epoch: int | None, step: int) -> int | None:
        is_match = (self.steps.epoch[self.step_index] == epoch) & (self.steps.step[self.step_index] == step)
        return int(np.argmax(is_match)) if is_match.any() else None


def points_of(steps: StepColumns, begin_ns: int, end_ns: int) -> RooflinePoints:
    ends = steps.end_ns
    is_available = np.zeros(len(steps), np.bool_)
    if steps.flops.size == len(steps):
        is_available = (steps.flops > 0) & (steps.num_bytes > 0) & (steps.forward_ns > 0)
    index = np.flatnonzero(is_available & (ends >= begin_ns) & (ends <= end_ns))
    if not index.size:
        return NO_POINTS
    flops, seconds = steps.flops[index].astype(np.float64), steps.forward_ns[index] / 1e9
    prefill, decode = steps.prefill[index], steps.decode[index]
    kind = np.where(prefill == 0, PointKind.DECODE, np.where(decode == 0, PointKind.PREFILL, PointKind.MIXED)).astype(
        np.int64
    )
    return RooflinePoints(steps, index, flops / steps.num_bytes[index], flops / seconds, kind)


_NONE: Final = np.empty(0, np.float64)
NO_POINTS: Final = RooflinePoints(NO_STEPS, np.empty(0, np.int64), _NONE, _NONE, np.empty(0, np.int64))
