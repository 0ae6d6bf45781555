"""Tests of the engine process of the desktop: start, log, restart and end, with real processes."""

from __future__ import annotations

import os
import signal
import stat
import sys

import pytest
from tests.processes import needs_unix

from kvscope_app.engine_launcher.engine_process import EngineProcess, serve_command
from kvscope_app.engine_launcher.engine_supervisor import EngineSupervisor
from kvscope_telemetry.errors import KvscopeError

SLEEP = [sys.executable, "-c", "import time; print('serving {endpoint}', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
]
FAILS = [
    sys.executable,
    "-c",
    "import sys; sys.stderr.write('first\\nkvscope-engine: no such model: x\\n'); sys.exit(2)",
]


@pytest.fixture
def start_process(request):
    processes = []

    def start(command, **options):
        process = EngineProcess(command=command, **options)
        processes.append(process)
        process.start()
        return process

    yield start
    for process in processes:
        process.kill()
        process.keeps_running = False
        process.close()


def wait_for(process, qtbot, text):
    qtbot.waitUntil(lambda: text in process.log_text(), timeout=120_000)


def test_engine_runtime_folder_is_private_and_is_removed_on_close(start_process, qtbot):
    process = start_process(SLEEP)
    assert stat.S_IMODE(process.folder.stat().st_mode) == 0o700
    wait_for(process, qtbot, f"serving ipc://{process.folder}/telemetry")
    assert process.end_reason() is None
    process.close()
    assert not process.is_running
    assert not process.folder.exists()


def test_engine_that_ignores_sigterm_is_killed(start_process, qtbot):
    process = start_process(STUBBORN)
    wait_for(process, qtbot, "deaf")
    process.close()
    assert not process.is_running
    assert "SIGKILL" in process.end_reason()


def test_engine_started_with_keep_survives_close(start_process, qtbot):
    process = start_process(SLEEP, keep=True)
    wait_for(process, qtbot, "serving")
    process.close()
    assert process.is_running
    assert process.folder.exists()


def test_end_reason_is_the_last_line_of_the_log(start_process, qtbot):
    process = start_process(FAILS)
    qtbot.waitUntil(lambda: not process.is_running, timeout=120_000)
    assert process.end_reason() == "no such model: x"
    assert "first" in process.log_text()


def test_changed_option_replaces_the_old_value_at_the_next_start(start_process, qtbot):
    process = start_process([sys.executable, "-c", "import sys; print('told', sys.argv[1:])", "--dtype=float32"])
    wait_for(process, qtbot, "told ['--dtype=float32']")
    for value in ("a8", "auto"):
        process.set_option("--quantization", value)
        qtbot.waitUntil(lambda: not process.is_running, timeout=120_000)
        process.start()
        wait_for(process, qtbot, f"told ['--dtype=float32', '--quantization={value}']")


def test_missing_program_raises_an_error(start_process):
    with pytest.raises(KvscopeError, match="cannot be started"):
        start_process(["/no/such/program"])


def test_log_contains_only_the_last_state_of_a_progress_bar(start_process, qtbot):
    process = start_process([sys.executable, "-c", "print('10 %\\r50 %\\r100 %')"])
    qtbot.waitUntil(lambda: not process.is_running, timeout=120_000)
    assert process.log_text() == "100 %"


@needs_unix
def test_supervisor_reports_a_killed_engine_once_and_restarts_it(start_process, qtbot):
    process = start_process(SLEEP)
    supervisor = EngineSupervisor(process)
    try:
        wait_for(process, qtbot, "serving")
        with qtbot.waitSignal(supervisor.ended, timeout=120_000) as waited:
            os.kill(process.pid, signal.SIGKILL)
        assert waited.args == ["killed by SIGKILL"]
        with qtbot.assertNotEmitted(supervisor.ended, wait=300):
            pass
        with qtbot.waitSignal(supervisor.started, timeout=120_000):
            supervisor.restart()
        assert supervisor.is_running
    finally:
        supervisor.detach()
        supervisor.deleteLater()


def test_supervisor_restart_of_a_running_engine_does_not_emit_ended(start_process, qtbot):
    process = start_process(SLEEP)
    supervisor = EngineSupervisor(process)
    try:
        wait_for(process, qtbot, "serving")
        old = process.pid
        with qtbot.assertNotEmitted(supervisor.ended), qtbot.waitSignal(supervisor.started, timeout=120_000):
            supervisor.restart()
        assert process.pid != old
    finally:
        supervisor.detach()
        supervisor.deleteLater()


def test_serve_command_exits_with_its_parent_unless_kept():
    pytest.importorskip("torch", reason="the engine is not installed here")
    assert serve_command("ipc:///x/telemetry", ["--seed=1"], keep=False)[-2:] == ["--seed=1", "--exit-with-parent"]
    assert "--exit-with-parent" not in serve_command("ipc:///x/telemetry", [], keep=True)


def test_missing_engine_package_is_reported_with_an_alternative(monkeypatch):
    monkeypatch.setattr("kvscope_app.engine_launcher.engine_process.find_spec", lambda name: None)
    with pytest.raises(KvscopeError, match="--attach ENDPOINT"):
        EngineProcess()
