"""Tests of the removal of runtime folders that killed desktops left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.processes import needs_unix

from kvscope_app.engine_launcher.engine_process import EngineProcess, record_owner, remove_stale
from kvscope_app.engine_launcher.process_identity import identity_of, is_alive, own_identity

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
DESKTOP = (
    "import sys, time\n"
    "from kvscope_app.engine_launcher.engine_process import EngineProcess\n"
    "engine = EngineProcess(command=[sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "engine.start()\n"
    "print(engine.pid, flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def runtime_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_process_identity_consists_of_pid_and_start_time():
    assert is_alive(own_identity())
    pid = os.getpid()
    assert not is_alive(f"{pid}-1")  # an earlier process with the same pid
    assert not is_alive("0-0")
    assert not is_alive("nonsense")
    assert not is_alive(f"{10**12}-5")


def test_folders_are_removed_only_if_all_owners_are_dead(runtime_folder):
    with subprocess.Popen(SLEEP) as process:
        dead, mixed = identity_of(process.pid), runtime_folder / "kvscope-mixed"
        process.kill()
    for name in ("dead", "mixed", "living", "unnamed"):
        (runtime_folder / f"kvscope-{name}").mkdir()
    for name in ("dead", "mixed"):
        (runtime_folder / f"kvscope-{name}" / "owners").write_text(f"{dead}\n")
        (runtime_folder / f"kvscope-{name}" / "telemetry").write_text("")
    record_owner(mixed, os.getpid())
    record_owner(runtime_folder / "kvscope-living", os.getpid())
    (runtime_folder / "kvscope-link").symlink_to(runtime_folder / "kvscope-dead")
    assert remove_stale(runtime_folder) == [runtime_folder / "kvscope-dead"]
    left = {path.name for path in runtime_folder.iterdir()}
    assert left == {"kvscope-mixed", "kvscope-living", "kvscope-unnamed", "kvscope-link"}


@needs_unix
def test_folder_of_a_killed_desktop_is_removed_once_its_engine_has_ended(runtime_folder):
    with subprocess.Popen([sys.executable, "-c", DESKTOP], stdout=subprocess.PIPE) as desktop:
        engine_pid = int(desktop.stdout.readline())
        desktop.kill()
    (folder,) = runtime_folder.iterdir()
    EngineProcess(command=SLEEP).close()
    assert folder.exists()  # its engine is still running
    identity = identity_of(engine_pid)
    os.kill(engine_pid, signal.SIGKILL)
    while is_alive(identity):
        pass
    EngineProcess(command=SLEEP).close()
    assert list(runtime_folder.iterdir()) == []
