"""Runs Qt's event loop for some time, or until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QEventLoop, QTimer, SignalInstance

_LOADED_MS: Final = 15_000
_LOOK_S: Final = 0.1


def run_for(seconds: float) -> None:
    """Run the event loop for this long."""
    loop = QEventLoop()
    QTimer.singleShot(int(seconds * 1000), loop.quit)
    loop.exec()


def run_until(signal: object) -> None:
    """Run the event loop until `signal` is emitted, for at most a quarter of a minute."""
    assert isinstance(signal, SignalInstance), "a bound signal"
    loop = QEventLoop()
    signal.connect(loop.quit)
    QTimer.singleShot(_LOADED_MS, loop.quit)
    loop.exec()


def run_while(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Run the event loop while `is_so()` holds; returns False when that lasts longer than `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while is_so():
        if time.monotonic() >= deadline_s:
            return False
        run_for(_LOOK_S)
    return True
