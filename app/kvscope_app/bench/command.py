"""The command `kvscope bench`: a synthetic engine, the real window, a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvscope_app.bench.startup import Startup, measure_startup
from kvscope_telemetry.errors import KvscopeError

_WARM_UP_S: Final = 2.0
_SIZE: Final = (1600, 900)


def run_bench(args: argparse.Namespace) -> int:
    """Measure and print; the exit code."""
    from kvscope_app.window.display_server import require_display, require_qt

    require_display(os.environ)
    require_qt()
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        os.environ["XDG_CONFIG_HOME"] = folder  # nobody's layout is read or written
        endpoint = f"ipc://{folder}/engine/telemetry"
        os.mkdir(f"{folder}/engine", mode=0o700)
        with _synthetic_engine(endpoint, args):
            startup = measure_startup(endpoint, folder, args.startup_runs) if args.startup_runs else None
            result = _measure_smoothness(endpoint, args)
    result = {"blocks": args.blocks, "rate": args.rate, **result, **_startup_result(startup)}
    print(json.dumps(result) if args.json else _table(result))
    return 0


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
    from PySide6.QtCore import QSettings

    from kvscope_app.bench.smoothness import Meter
    from kvscope_app.command_line import Options
    from kvscope_app.desktop import Desktop, make_application

    app = make_application()
    settings = QSettings()
    desktop = Desktop(app, Options(theme="dark"), settings)
    window = desktop.open_window(endpoint)
    window.resize(*_SIZE)
    _run_until(window.views_loaded)
    if args.map_only:
        for dock in window.docks.values():
            dock.hide()
    _run_for(_WARM_UP_S)
    if window.session.mirror.hello is None:
        raise KvscopeError("no telemetry came from the synthetic engine")
    meter = Meter(window.page_map.canvas, window.session)
    _run_for(args.seconds)
    result: dict[str, object] = dataclasses.asdict(meter.stop())
    window.close()
    desktop.close()
    settings.sync()  # later it would write into a folder that is gone, and so bring it back
    return result


def _run_for(seconds: float) -> None:
    from PySide6.QtCore import QEventLoop, QTimer

    loop = QEventLoop()
    QTimer.singleShot(int(seconds * 1000), loop.quit)
    loop.exec()


def _run_until(signal: object) -> None:
    from PySide6.QtCore import QEventLoop, QTimer, SignalInstance

    assert isinstance(signal, SignalInstance), "a bound signal"
    loop = QEventLoop()
    signal.connect(loop.quit)
    QTimer.singleShot(15_000, loop.quit)
    loop.exec()


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
