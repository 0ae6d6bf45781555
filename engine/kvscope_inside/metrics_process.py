"""Starts and ends a separate process that serves `/metrics` for an engine that is watched from inside.

The process runs if the environment variable `KVSCOPE_METRICS` is set. It has the lowest priority, attaches to the
telemetry as a desktop does, and ends with the engine's process even if that is killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final

METRICS: Final = "KVSCOPE_METRICS"
"""Environment variable with the address at which metrics are served, HOST:PORT."""


class MetricsProcess:
    """Process that serves the metrics of `endpoint` at the address in `METRICS`. Nothing is started if `METRICS` is
    unset.

    Data-parallel rank n uses PORT + n. `on_problem` is called with one line if the process does not start.
    """

    def __init__(self, endpoint: str, rank: int, on_problem: Callable[[str], None]) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._on_problem = on_problem
        if listen := os.environ.get(METRICS, ""):
            host, _, port = listen.rpartition(":")
            listen = f"{host}:{int(port) + rank}" if port.isdigit() else listen
            self._process = self._start(endpoint, listen)
            self._watcher = threading.Thread(target=self._monitor, args=(self._process,), name="kvscope-metrics")
            self._watcher.daemon = True
            self._watcher.start()

    def close(self) -> None:
        """Kill the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.kill()
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait()
            self._watcher.join(timeout=1.0)

    def _start(self, endpoint: str, listen: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kvscope_telemetry.metrics.serve", endpoint, listen],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _monitor(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None, "piped"
        with process.stderr as lines:
            last_lines = [line.strip() for line in lines if line.strip()][-1:]
        if self._process is not None:
            self._on_problem(f"no metrics are served: {last_lines[0] if last_lines else 'their process ended'}")
