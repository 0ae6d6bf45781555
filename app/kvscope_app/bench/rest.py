"""Measures the processor time that an idle window takes, for each way of looking for news, and what the engine takes
meanwhile.

All threads of the desktop are counted, and the processes that write what its sessions keep. No person moves a mouse.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from kvscope_app.bench.event_loop import run_for, run_until, run_while
from kvscope_app.bench.processor_time import cpu_of_rings_s, process_cpu_s
from kvscope_app.desktop import Desktop
from kvscope_app.own_engine.engine_process import EngineProcess
from kvscope_app.window.main_window import MainWindow
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording
from kvscope_telemetry.source import SourceState

_SETTLE_S: Final = 12.0
"""From a change until curves have come to rest."""
_START_S: Final = 300.0
"""An engine that starts may have a model to read."""
_EVERY_VIEW: Final = ("timeline", "heatmap", "memory", "throughput", "events", "inspector", "prefixes")


def measure_rest(
    desktop: Desktop, endpoint: str, engine: EngineProcess | None, seconds: float, size: tuple[int, int]
) -> dict[str, float]:
    """Percents of a core, each over `seconds`, of windows on `endpoint` and of `engine` where it is known. Raises
    KvscopeError where no engine is live there in five minutes."""
    window = desktop.open_window(endpoint)
    window.resize(*size)
    run_until(window.views_loaded)
    if not run_while(lambda: window.session.status.state is not SourceState.LIVE, _START_S):
        raise KvscopeError(f"no engine is live at {endpoint}: {window.session.status.state}")
    result = {}
    began_s, engine_s = time.monotonic(), _engine_cpu_s(engine)
    result["window_percent"] = _percent(desktop, seconds)
    if engine is not None:
        took_s = _engine_cpu_s(engine) - engine_s
        result["engine_percent"] = round(100 * took_s / (time.monotonic() - began_s), 2)
    for name, begin, end in _ways(window):
        begin()
        result[f"{name}_percent"] = _percent(desktop, seconds)
        end()
    window.close()
    result["playback_at_rest_percent"] = _playback(desktop, seconds, size)
    return result


def _engine_cpu_s(engine: EngineProcess | None) -> float:
    return math.nan if engine is None else process_cpu_s(engine.pid)


def _percent(desktop: Desktop, seconds: float) -> float:
    run_for(_SETTLE_S)
    began_s, cpu_s = time.monotonic(), _cpu_s(desktop)
    run_for(seconds)
    return round(100 * (_cpu_s(desktop) - cpu_s) / (time.monotonic() - began_s), 2)


def _cpu_s(desktop: Desktop) -> float:
    return time.process_time() + cpu_of_rings_s(desktop.sessions)


def _ways(window: MainWindow) -> list[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Name, how it begins and how it ends."""
    return [
        ("paused", window.session.timeline.pause, window.session.timeline.go_live),
        ("minimised", window.showMinimized, window.showNormal),
        ("every_view", lambda: _open_every_view(window), lambda: None),
    ]


def _open_every_view(window: MainWindow) -> None:
    """In windows of their own: in one, docks of a few pixels each would draw next to nothing."""
    for name in _EVERY_VIEW:
        dock = window.docks[name]
        dock.setFloating(True)
        dock.resize(640, 420)
        dock.show()


def _playback(desktop: Desktop, seconds: float, size: tuple[int, int]) -> float:
    window = desktop.open_recording(Recording.open(str(sample_recording())))
    window.resize(*size)
    run_until(window.views_loaded)
    window.session.timeline.pause()
    percent = _percent(desktop, seconds)
    window.close()
    return percent
