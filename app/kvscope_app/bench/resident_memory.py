"""Resident memory of the window and of the processes that write what it keeps, over the time of a measurement."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np
from PySide6.QtCore import QTimer

EVERY_MS: Final = 1_000
_PARTS: Final = 10
"""First and last are medians of so small a part of the samples: a moment's buffers do not count."""


class ResidentMemory:
    """Asks for the sizes of processes while the event loop runs. 0 MB where the system does not tell them."""

    def __init__(self, pids: Callable[[], Iterable[int]], every_ms: int = EVERY_MS) -> None:
        self._pids = pids
        self._samples: list[float] = []
        self._timer = QTimer()
        self._timer.setInterval(every_ms)
        self._timer.timeout.connect(self._sample)
        self._timer.start()
        self._sample()

    def stop(self) -> tuple[float, float, float]:
        """MB at first, at last and at most."""
        self._timer.stop()
        self._sample()
        length = max(1, len(self._samples) // _PARTS)
        first, last = np.median(self._samples[:length]), np.median(self._samples[-length:])
        return round(float(first), 1), round(float(last), 1), round(max(self._samples), 1)

    def _sample(self) -> None:
        self._samples.append(sum(_resident_mb(pid) for pid in self._pids()))


def _resident_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError):  # it ended, or the system has no such file
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
