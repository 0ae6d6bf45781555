"""Opens the desktop for a benchmark, runs Qt's event loop, and reads the processor time of processes."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from PySide6.QtCore import QEventLoop, QSettings, QTimer, SignalInstance

from kvscope_app.application import make_application
from kvscope_app.command_line import Options
from kvscope_app.desktop import Desktop
from kvscope_app.session.session import Session
from kvscope_app.window.display_server import require_display

WINDOW_SIZE: Final = (1600, 900)
_SIGNAL_TIMEOUT_MS: Final = 15_000
_POLL_S: Final = 0.1


@contextmanager
def open_desktop() -> Iterator[Desktop]:
    """Open a desktop with temporary settings, so that the user's layout is neither read nor written. Closes it
    at the end.
    """
    require_display(os.environ)
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        app = make_application()
        settings = QSettings()
        desktop = Desktop(app, Options(theme="dark"), settings)
        try:
            yield desktop
        finally:
            for window in list(desktop.windows):
                window.close()
            desktop.close()
            settings.sync()  # later it would write into a folder that is gone, and so bring it back


def run_for(seconds: float) -> None:
    loop = QEventLoop()
    QTimer.singleShot(int(seconds * 1000), loop.quit)
    loop.exec()


def run_until(signal: object) -> None:
    """Run the event loop until `signal` is emitted, for at most 15 seconds."""
    assert isinstance(signal, SignalInstance), "a bound signal"
    loop = QEventLoop()
    signal.connect(loop.quit)
    QTimer.singleShot(_SIGNAL_TIMEOUT_MS, loop.quit)
    loop.exec()


def run_while(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Run the event loop while `condition()` holds. Returns False if it still holds after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while condition():
        if time.monotonic() >= deadline_s:
            return False
        run_for(_POLL_S)
    return True


def process_cpu_s(pid: int) -> float:
    """Return the processor time of process `pid` so far in seconds; NaN if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_of_rings_s(sessions: Iterable[Session]) -> float:
    times = [process_cpu_s(pid) for pid in pids_of_rings(sessions)]
    return sum(seconds for seconds in times if not math.isnan(seconds))


def pids_of_rings(sessions: Iterable[Session]) -> list[int]:
    pids = [session.disk_history.ring.pid for session in sessions if session.disk_history is not None]
    return [pid for pid in pids if pid]


def print_result(result: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    width = max(len(name) for name in result)
    for name, value in result.items():
        print(f"{name.replace('_', ' '):<{width}}  {_cell(value):>12}")


def _cell(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
