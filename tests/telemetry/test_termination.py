"""Signals that end a program: every `finally` runs, and a closed terminal raises nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import needs_unix

from kvscope_telemetry.termination import END_SIGNALS

BODY = """
import os, signal, sys, time
from contextlib import suppress
from kvscope_telemetry.termination import exiting_on_signals, handling_signals, leaving_while_importing

def send(name):
    os.kill(os.getpid(), getattr(signal, name))
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BODY + body], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", [number.name for number in END_SIGNALS[1:]])
def test_signal_runs_cleanup_and_sets_the_exit_code(name: str) -> None:
    done = run(f"""
with exiting_on_signals():
    try:
        send({name!r})
        time.sleep(60)
    finally:
        print("cleaned up")
""")
    assert (done.returncode, done.stdout, done.stderr) == (128 + getattr(signal, name), "cleaned up\n", "")


@needs_unix
def test_second_sighup_does_not_interrupt_the_cleanup() -> None:
    done = run("""
with exiting_on_signals():
    try:
        with handling_signals(lambda *_: sys.exit(3)):
            send("SIGHUP")
    finally:
        send("SIGHUP")
        print("cleaned up")
""")
    assert (done.returncode, done.stdout) == (3, "cleaned up\n")


@needs_unix
def test_ignored_sighup_stays_ignored() -> None:
    done = run("""
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with exiting_on_signals():
    send("SIGHUP")
    print("still running")
""")
    assert (done.returncode, done.stdout) == (0, "still running\n")


def test_sigterm_while_importing_runs_the_given_cleanup_and_exits_with_one_line() -> None:
    done = run("""
with exiting_on_signals(), leaving_while_importing("x", lambda: print("the engine stopped", flush=True)):
    send("SIGTERM")
""")
    assert (done.returncode, done.stdout, done.stderr) == (143, "the engine stopped\n", "x: interrupted\n")


def test_sigterm_while_importing_is_left_to_a_handler_set_by_the_program() -> None:
    done = run("""
with handling_signals(lambda *_: print("handled")), leaving_while_importing("x"):
    send("SIGTERM")
""")
    assert (done.returncode, done.stdout) == (0, "handled\n")


def test_output_after_the_terminal_was_closed_raises_nothing(tmp_path: Path) -> None:
    """Without this handling, the last line that a recording prints raises OSError."""
    pty = pytest.importorskip("pty")
    terminal, child_side = pty.openpty()
    name, report = os.ttyname(child_side), tmp_path / "report"
    body = f"""
descriptor = os.open({name!r}, os.O_RDWR)  # becomes the terminal of this session
for standard in range(3):
    os.dup2(descriptor, standard)
stopped = []
with handling_signals(lambda *_: stopped.append(1)):
    print("ready", flush=True)
    while not stopped:
        time.sleep(0.01)
    print("the last line", flush=True)
with open({str(report)!r}, "w") as file:
    file.write("finished")
"""
    with subprocess.Popen([sys.executable, "-c", BODY + body], start_new_session=True) as process:
        assert b"ready" in os.read(terminal, 100)
        os.close(child_side)
        os.close(terminal)  # the kernel sends SIGHUP to the leader of the session
    assert process.returncode == 0
    assert report.read_text() == "finished"
