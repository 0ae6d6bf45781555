"""The command `kvscope bench`: the real window, on a busy synthetic engine or a real one at rest, and a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvscope_telemetry.errors import KvscopeError

if TYPE_CHECKING:
    from kvscope_app.desktop import Desktop
    from kvscope_app.own_engine.engine_process import EngineProcess

_VARIABLE: Final = "KVSCOPE_STARTUP_PROBE"
_PATIENCE_S: Final = 60
_WARM_UP_S: Final = 2.0
_BUSY_S: Final = 10.0
_IDLE_S: Final = 30.0
_SIZE: Final = (1600, 900)


def run_bench(args: argparse.Namespace) -> int:
    """Measure and print; the exit code."""
    from kvscope_app.window.display_server import require_display, require_qt

    require_display(os.environ)
    require_qt()
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        os.environ["XDG_CONFIG_HOME"] = folder  # nobody's layout is read or written
        result = _rest(args) if args.idle else _busy(args, folder)
    print(json.dumps(result) if args.json else _table(result))
    return 0


def _rest(args: argparse.Namespace) -> dict[str, object]:
    """Percents of a core while nothing happens."""
    from kvscope_app.bench.rest import measure_rest

    seconds = args.seconds or _IDLE_S
    with _own_engine(args.attach) as engine, open_desktop() as desktop:
        endpoint = args.attach if engine is None else engine.endpoint
        return {"seconds_each": seconds, **measure_rest(desktop, endpoint, engine, seconds, _SIZE)}


@contextmanager
def _own_engine(other: str | None) -> Iterator[EngineProcess | None]:
    """Where no other is named: one as the desktop starts it."""
    if other is not None:
        yield None
        return
    from kvscope_app.own_engine.engine_process import EngineProcess

    engine = EngineProcess()
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


def _busy(args: argparse.Namespace, folder: str) -> dict[str, object]:
    """A pool that changes all the time."""
    endpoint = f"ipc://{folder}/engine/telemetry"
    os.mkdir(f"{folder}/engine", mode=0o700)
    with _synthetic_engine(endpoint, args):
        startup = measure_startup(endpoint, folder, args.startup_runs) if args.startup_runs else None
        result = _measure_smoothness(endpoint, args)
    return {"blocks": args.blocks, "rate": args.rate, **result, **_startup_result(startup)}


@contextmanager
def _synthetic_engine(endpoint: str, args: argparse.Namespace) -> Iterator[None]:
    command = [sys.executable, "-m", "kvscope_telemetry.synthetic", "--endpoint", endpoint, "--until-eof"]
    command += ["--blocks", str(args.blocks), "--rate", str(args.rate)]
    command += ["--host-blocks", str(args.host_blocks), "--disk-blocks", str(args.disk_blocks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "a pipe"
        assert process.stdin is not None, "a pipe"
        if not process.stdout.readline().startswith("serving"):
            raise KvscopeError("the synthetic engine did not start")
        try:
            yield
        finally:
            process.stdin.close()
            process.wait(timeout=10)


def _measure_smoothness(endpoint: str, args: argparse.Namespace) -> dict[str, object]:
    from kvscope_app.bench.event_loop import run_for, run_until
    from kvscope_app.bench.smoothness import Meter

    with open_desktop() as desktop:
        window = desktop.open_window(endpoint)
        window.resize(*_SIZE)
        run_until(window.views_loaded)
        if args.map_only:
            for dock in window.docks.values():
                dock.hide()
        run_for(_WARM_UP_S)
        if window.session.mirror.hello is None:
            raise KvscopeError("no telemetry came from the synthetic engine")
        meter = Meter(window.page_map.canvas, window.session)
        run_for(args.seconds or _BUSY_S)
        result: dict[str, object] = dataclasses.asdict(meter.stop())
        window.close()
    return result


@contextmanager
def open_desktop() -> Iterator[Desktop]:
    """Closed at the end."""
    from PySide6.QtCore import QSettings

    from kvscope_app.command_line import Options
    from kvscope_app.desktop import Desktop, make_application

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


def _startup_result(startup: Startup | None) -> dict[str, object]:
    if startup is None:
        return {}
    ordered = sorted(startup.first_expose_s)
    return {
        "first_expose_s": ordered[len(ordered) // 2],
        "first_expose_max_s": ordered[-1],
        "heavy_modules_imported": list(startup.heavy_modules),
    }


def _table(result: dict[str, object]) -> str:
    width = max(len(name) for name in result)
    return "\n".join(f"{name.replace('_', ' '):<{width}}  {_shown(value):>12}" for name, value in result.items())


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


@dataclass(frozen=True, slots=True)
class Startup:
    """Measures from the command to the first exposed window, in fresh processes.

    First exposure of the window, seconds from the start of the process, one entry a run.
    """

    first_expose_s: tuple[float, ...]
    heavy_modules: tuple[str, ...]
    """Of torch and the engine, those the desktop had imported by then: must be none."""


def measure_startup(endpoint: str, settings_folder: str, runs: int) -> Startup:
    """Start the desktop `runs` times, attached to `endpoint`. Raises KvscopeError when a window does not come."""
    results = [_one(endpoint, settings_folder) for _ in range(runs)]
    heavy = {name for _, names in results for name in names}
    return Startup(tuple(seconds for seconds, _ in results), tuple(sorted(heavy)))


def _one(endpoint: str, settings_folder: str) -> tuple[float, list[str]]:
    environment = {**os.environ, "XDG_CONFIG_HOME": settings_folder, _VARIABLE: str(time.monotonic_ns())}
    command = [sys.executable, "-m", "kvscope_app.main", "--attach", endpoint]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)
        figures = json.loads(done.stdout.splitlines()[-1])
        return float(figures["first_expose_s"]), list(figures["heavy_modules"])
    except (subprocess.TimeoutExpired, IndexError, ValueError, KeyError) as error:
        raise KvscopeError(f"the window did not come up: {type(error).__name__}: {error}") from error
