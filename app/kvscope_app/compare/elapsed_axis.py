"""The bottom axis of a comparison: time since the beginning, which is the same for both runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvscope_app.playback.playback import time_text
from kvscope_app.views.chart.axes import TimeAxis

_STEPS_S: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)
_APART_PX: Final = 70


class ElapsedAxis(TimeAxis):
    """`0:30`, `1:02:00`."""

    def clock_text(self, value: float) -> str:
        return time_text(max(value, 0.0), value)

    def tickValues(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, list[float]]]:
        """Round times, far enough apart for their words."""
        wanted = (maxVal - minVal) * _APART_PX / max(size, 1)
        step = next((step for step in _STEPS_S if step >= wanted), _STEPS_S[-1])
        places = np.arange(np.ceil(minVal / step), np.floor(maxVal / step) + 1)
        return [(step, (step * places).tolist())]

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        """Tenths only where they differ."""
        texts = [self.clock_text(value) for value in values]
        return texts if spacing < 1 else [text.partition(".")[0] for text in texts]
