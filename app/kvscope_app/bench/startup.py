"""Measures from the command to the first exposed window, in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

from kvscope_telemetry.errors import KvscopeError

_VARIABLE: Final = "KVSCOPE_STARTUP_PROBE"
_PATIENCE_S: Final = 60


@dataclass(frozen=True, slots=True)
class Startup:
    """First exposure of the window, seconds from the start of the process, one entry a run."""

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
        told = json.loads(done.stdout.splitlines()[-1])
        return float(told["first_expose_s"]), list(told["heavy_modules"])
    except (subprocess.TimeoutExpired, IndexError, ValueError, KeyError) as error:
        raise KvscopeError(f"the window did not come up: {type(error).__name__}: {error}") from error
