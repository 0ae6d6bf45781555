"""Measure the processor time of an idle window and an idle engine, in percent of a core.

The window is measured with the default layout, paused, minimised, with every view open, and with a paused recording;
this takes about five minutes. All threads of the desktop count, and the processes that write the recent history of its
sessions.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from benchmarks.command_line import run_benchmark
from benchmarks.desktop_harness import (
    WINDOW_SIZE,
    cpu_of_rings_s,
    open_desktop,
    print_result,
    process_cpu_s,
    run_for,
    run_until,
    run_while,
)
from kvscope_app.desktop import Desktop
from kvscope_app.engine_launcher.engine_process import EngineProcess
from kvscope_app.window.main_window import MainWindow
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording
from kvscope_telemetry.source import SourceState

_SETTLE_S: Final = 12.0
"""Seconds after a change after which curves no longer move."""
_START_TIMEOUT_S: Final = 300.0
EVERY_VIEW: Final = ("timeline", "heatmap", "memory", "throughput", "events", "inspector", "prefixes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="length of each part (default: 30)")
    parser.add_argument(
        "--attach",
        metavar="ENDPOINT",
        help="watch this engine, which should be idle (default: start one with the default model and measure it too)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    with _engine_to_measure(args.attach) as engine, open_desktop() as desktop:
        endpoint = args.attach if engine is None else engine.endpoint
        result = measure_idle(desktop, endpoint, engine, args.seconds)
    print_result({"seconds_each": args.seconds, **result}, args.json)
    return 0


@contextmanager
def _engine_to_measure(endpoint: str | None) -> Iterator[EngineProcess | None]:
    """Start an engine in the same way as the desktop and yield it. Yields None if the user named an engine's
    `endpoint` to attach to.
    """
    if endpoint is not None:
        yield None
        return
    engine = EngineProcess()
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


def measure_idle(desktop: Desktop, endpoint: str, engine: EngineProcess | None, seconds: float) -> dict[str, float]:
    """Return percents of a core, each over `seconds`, of windows on `endpoint`, and of `engine` unless it is None.

    Raises KvscopeError if no engine is live at `endpoint` within five minutes.
    """
    window = desktop.open_window(endpoint)
    window.resize(*WINDOW_SIZE)
    run_until(window.views_loaded)
    if not run_while(lambda: window.session.status.state is not SourceState.LIVE, _START_TIMEOUT_S):
        raise KvscopeError(f"no engine is live at {endpoint}: {window.session.status.state}")
    result = {}
    began_s, engine_s = time.monotonic(), _engine_cpu_s(engine)
    result["window_percent"] = _percent(desktop, seconds)
    if engine is not None:
        took_s = _engine_cpu_s(engine) - engine_s
        result["engine_percent"] = round(100 * took_s / (time.monotonic() - began_s), 2)
    for name, enter, leave in idle_modes(window):
        enter()
        result[f"{name}_percent"] = _percent(desktop, seconds)
        leave()
    window.close()
    result["playback_at_rest_percent"] = _playback(desktop, seconds)
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


def idle_modes(window: MainWindow) -> list[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Return the modes in which a window is idle as (name, function that enters it, function that leaves it)."""
    return [
        ("paused", window.session.timeline.pause, window.session.timeline.go_live),
        ("minimised", window.showMinimized, window.showNormal),
        ("every_view", lambda: _open_every_view(window), lambda: None),
    ]


def _open_every_view(window: MainWindow) -> None:
    """Open every view in a separate window. If all were docks of one window, each would be too small to draw
    anything.
    """
    for name in EVERY_VIEW:
        dock = window.docks[name]
        dock.setFloating(True)
        dock.resize(640, 420)
        dock.show()


def _playback(desktop: Desktop, seconds: float) -> float:
    window = desktop.open_recording(Recording.open(str(sample_recording())))
    window.resize(*WINDOW_SIZE)
    run_until(window.views_loaded)
    window.session.timeline.pause()
    percent = _percent(desktop, seconds)
    window.close()
    return percent


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
