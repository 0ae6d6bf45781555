"""Stopping a service by a signal, with and without the process that guards the stop."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope_engine.cli.signal_shutdown import Stopping

_WITH_KILLED_GUARD = """
import os, signal, time
from pathlib import Path
from types import SimpleNamespace

from kvscope_engine.cli.signal_shutdown import stopped_by_signals

stops = []
with stopped_by_signals(60) as stopping:
    stopping.set_service(SimpleNamespace(is_loading=False, stop=lambda: stops.append("stopped")))
    (guard,) = Path("/proc/thread-self/children").read_text().split()
    os.kill(int(guard), signal.SIGKILL)
    while Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    while not stops:
        time.sleep(0.01)
print(stops)
os._exit(0)
"""


def test_sigterm_after_the_guard_was_killed_stops_the_service_and_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _WITH_KILLED_GUARD], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("['stopped']\n", "", 0)


def test_service_is_stopped_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    stops: list[str] = []
    service: Any = SimpleNamespace(is_loading=False, stop=lambda: stops.append("stopped"))
    stopping = Stopping(60)
    stopping.set_service(service)
    stopping.request_stop(15, None)
    assert stops == ["stopped"]
