"""A process forked from a warm Python behaves like a new one."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.warm_python import WarmPython

TELL = """
import os, sys, torch, transformers
print(os.getpid(), os.getcwd(), os.environ["KVSCOPE_CACHE"], sys.argv[1:], __name__)
print(torch.ones(300, 300).matmul(torch.ones(300, 300)).sum().item(), file=sys.stderr)
sys.exit(3)
"""
WAIT = "import sys, time; print('here', file=sys.stderr, flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def _forks(warm_python: WarmPython) -> None:
    if not warm_python.can_fork():
        pytest.skip("nothing is forked with a GPU or with threads of a library's")


def test_process_forked_from_warm_python_has_its_own_arguments_folder_and_environment(
    warm_python: WarmPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSCOPE_CACHE", "elsewhere")
    monkeypatch.chdir(tmp_path)
    outputs = [warm_python.run(["-c", TELL, "a", "b c"]) for _ in range(2)]
    assert [(done.returncode, done.stderr) for done in outputs] == [(3, "27000000.0\n")] * 2
    numbers = [int(done.stdout.split()[0]) for done in outputs]
    assert len({*numbers, os.getpid()}) == 3
    assert all(done.stdout.endswith(f" {tmp_path} elsewhere ['a', 'b c'] __main__\n") for done in outputs)


def test_process_forked_from_warm_python_runs_the_console_command(warm_python: WarmPython) -> None:
    done = warm_python.run(["serve", "--endpoint", "nowhere"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvscope-engine: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_process_can_be_killed_and_waited_for(warm_python: WarmPython, number: int) -> None:
    process = warm_python.start(["-c", WAIT])
    assert process.stderr is not None
    with process.stderr as errors:
        assert errors.readline() == "here\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(number)
        assert process.wait(240) == -number
        assert process.poll() == -number
        process.kill()
        assert errors.read() == ""


def test_process_can_be_interrupted(warm_python: WarmPython) -> None:
    process = warm_python.start(["-c", WAIT])
    assert process.stderr is not None
    with process.stderr as errors:
        assert errors.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(240) != 0
        assert errors.read().endswith("KeyboardInterrupt\n")


def test_changed_import_environment_starts_a_new_python(
    warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSCOPE_OF_A_TEST", "yes")
    done = warm_python.run(["-c", "import os, sys; print(os.environ['KVSCOPE_OF_A_TEST'], 'torch' in sys.modules)"])
    assert done.stdout == "yes False\n"
