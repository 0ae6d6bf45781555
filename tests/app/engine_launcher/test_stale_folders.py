"""What a killed desktop left behind goes at the next start; what a living one has stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvscope_app.engine_launcher.engine_process import EngineProcess, claim, remove_stale
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
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_process_is_known_by_its_number_and_its_start():
    assert is_alive(own_identity())
    pid = os.getpid()
    assert not is_alive(f"{pid}-1")  # another that had the number before
    assert not is_alive("0-0")
    assert not is_alive("nonsense")
    assert not is_alive(f"{10**12}-5")


def test_folders_of_the_dead_go_and_all_others_stay(runtime):
    with subprocess.Popen(SLEEP) as process:
        dead, mixed = identity_of(process.pid), runtime / "kvscope-mixed"
        process.kill()
    for name in ("dead", "mixed", "living", "unnamed"):
        (runtime / f"kvscope-{name}").mkdir()
    for name in ("dead", "mixed"):
        (runtime / f"kvscope-{name}" / "owners").write_text(f"{dead}\n")
        (runtime / f"kvscope-{name}" / "telemetry").write_text("")
    claim(mixed, os.getpid())
    claim(runtime / "kvscope-living", os.getpid())
    (runtime / "kvscope-link").symlink_to(runtime / "kvscope-dead")
    assert remove_stale(runtime) == [runtime / "kvscope-dead"]
    left = {path.name for path in runtime.iterdir()}
    assert left == {"kvscope-mixed", "kvscope-living", "kvscope-unnamed", "kvscope-link"}


def test_after_kill_9_the_next_start_cleans_up_but_not_under_a_living_engine(runtime):
    with subprocess.Popen([sys.executable, "-c", DESKTOP], stdout=subprocess.PIPE) as desktop:
        engine_pid = int(desktop.stdout.readline())
        desktop.kill()
    (folder,) = runtime.iterdir()
    EngineProcess(command=SLEEP).close()
    assert folder.exists()  # its engine lives
    identity = identity_of(engine_pid)
    os.kill(engine_pid, signal.SIGKILL)
    while is_alive(identity):
        pass
    EngineProcess(command=SLEEP).close()
    assert list(runtime.iterdir()) == []
