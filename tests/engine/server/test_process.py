"""The engine as a process: signals, kill -9, a dead parent, a second engine, failures, exit codes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from kvscope_telemetry.messages.commands import Control, Done, Finished, GetStatus, Refused, Status, Submit, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Goodbye, Heartbeat

if TYPE_CHECKING:
    from conftest import Client

Serving = Callable[..., "subprocess.Popen[str]"]
ENDLESS = Submit(request_id="endless", prompt="go on", sampling=SamplingParams(max_tokens=1_000_000))


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error."""
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def wait_until_gone(pid: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while _is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_stops_the_engine_in_order(serving: Serving, client: Client, number: signal.Signals) -> None:
    process = serving(step_s=0.01)
    client.wait_ready()
    client.telemetry(Heartbeat)
    client.send(ENDLESS)
    client.receive(Tokens)
    process.send_signal(number)
    assert client.receive(Finished).finish_reason == "abort"
    assert client.telemetry(Goodbye).reason == ""
    code, out, err = ended(process)
    assert (code, err) == (0, "")
    assert out.startswith("listening on ipc://")
    folder = Path(out.split()[2].removeprefix("ipc://")).parent
    assert [path for path in folder.iterdir() if path.is_socket()] == []


@pytest.mark.parametrize("how", ["signal", "command"])
def test_engine_can_be_stopped_while_loading(serving: Serving, client: Client, how: str) -> None:
    process = serving(load_s=600)
    assert client.ask(GetStatus(), Status).phase == "loading"
    if how == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        client.ask(Control(action="shutdown"), Done)
    assert ended(process)[0] == 0


def test_stop_while_loading_is_reported_and_leaves_no_partial_recording(
    serving: Serving, client: Client, folder: Path
) -> None:
    path = folder / "run.mcap"
    process = serving(load_s=600, record=path)
    assert client.ask(GetStatus(), Status).phase == "loading"
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert code == 0
    assert "ready" not in out
    assert (
        err == f"kvscope-engine: stopped before the model was loaded, and nothing is recorded: there is no '{path}'\n"
    )
    assert not list(folder.glob("run.mcap*"))


def test_ready_line_is_printed(serving: Serving, client: Client, folder: Path) -> None:
    process = serving()
    client.wait_ready()
    process.send_signal(signal.SIGTERM)
    _, out, _ = ended(process)
    listening, ready = out.splitlines()
    assert listening == f"listening on ipc://{folder}/telemetry, loading the model"
    assert re.fullmatch(rf"ready: fake on ipc://{folder}/telemetry, \d+ blocks of 16 tokens, after \d+\.\d s", ready)


@pytest.mark.parametrize("hang", ["load", "load C", "step", "step C"])
def test_stop_signal_ends_an_engine_process_that_hangs_while_loading_or_in_a_step(
    serving: Serving, client: Client, folder: Path, hang: str
) -> None:
    path = folder / "run.mcap"
    process = serving(hang=hang, stop_s=2, record=path)
    if hang.startswith("step"):
        client.wait_ready()
        client.send(ENDLESS)
        process_is_stuck(process.pid)
    else:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening on")
        process_is_stuck(process.pid)
    started_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert time.monotonic() - started_s < 60, "not within anything like its limit"
    if hang.endswith("C"):
        assert (code, err) == (
            -signal.SIGKILL,
            "kvscope-engine: did not stop within 2 s and was killed\n",
        )
    elif hang == "load":
        assert code == 0
    if hang == "step":
        assert (code, err) == (1, "kvscope-engine: it did not stop within 1.6 s and was ended\n")
        assert path.is_file(), "the recording must be complete"


@pytest.mark.parametrize("times", [1, 3])
def test_processes_of_a_build_tool_are_not_left_behind(serving: Serving, times: int) -> None:
    """The tool is killed by its parent, which orphans its compilers."""
    process = serving(hang="build", stop_s=60)
    deadline_s = time.monotonic() + 60
    while not (compiler := compiler_of(process.pid)):
        assert time.monotonic() < deadline_s, "nothing is built"
        time.sleep(0.005)
    for _ in range(times):
        process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert (code, err) == (0, "kvscope-engine: stopped before the model was loaded\n")
    wait_until_gone(compiler)


def compiler_of(pid: int) -> int:
    """Return the process that a child of `pid` waits for, or 0 if there is none."""
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.cmdline() == ["sleep", "986.25"]:
                return child.pid
    return 0


def process_is_stuck(pid: int) -> None:
    """Wait until the process has computed for a while, or waited long where nothing can wake it."""
    deadline_s, times = time.monotonic() + 5, psutil.Process(pid).cpu_times
    before_s = times().user
    while times().user - before_s < 1.5 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert _is_alive(pid)


def test_failing_forward_pass_is_exit_code_1_and_one_line(serving: Serving, client: Client) -> None:
    process = serving(step_s=0.01, fail_at_step=10)
    client.wait_ready()
    client.telemetry(Heartbeat)
    client.send(ENDLESS)
    assert "evil forward" in client.receive(Finished).error
    assert "evil forward" in client.telemetry(Goodbye).reason
    code, _, err = ended(process)
    assert code == 1
    assert err == "kvscope-engine: the engine died in a step: RuntimeError: evil forward\n"


@pytest.mark.parametrize(
    ("kind", "code", "line"),
    [
        ("bad input", 2, "model 'fake' is not accepted: it is not real"),
        ("no memory", 1, "there is no memory left: 1 byte of 2 is free"),
        ("bug", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_failed_model_load_prints_one_line_and_sets_the_exit_code(
    serving: Serving, kind: str, code: int, line: str
) -> None:
    exit_code, _, err = ended(serving(load_error=kind))
    assert (exit_code, err) == (code, f"kvscope-engine: {line}\n")


def test_second_engine_is_refused_and_the_first_continues(serving: Serving, client: Client, folder: Path) -> None:
    first = serving()
    client.wait_ready()
    code, _, err = ended(serving())
    assert code == 1
    assert err.count("\n") == 1
    assert str(folder) in err
    assert f"pid {first.pid}" in err
    assert client.ask(GetStatus(tag=3), Status).tag == 3


def test_clients_find_the_engine_that_replaces_a_killed_one(serving: Serving, client: Client) -> None:
    first = serving(step_s=0.01)
    client.wait_ready()
    client.send(ENDLESS)
    client.receive(Tokens)
    first.kill()
    first.wait()
    serving()
    assert client.ask(GetStatus(tag=8), Status).tag == 8, "the client must reconnect by itself"
    assert client.wait_ready().phase == "ready"
    assert client.telemetry(Heartbeat).num_unfinished in (0, 1)


CLIENT = """
import os, sys, time, zmq
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.wire import encode
context = zmq.Context()
subscriber, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
subscriber.connect(f"ipc://{sys.argv[1]}/telemetry")
subscriber.subscribe(b"")
dealer.connect(f"ipc://{sys.argv[1]}/command")
sampling = SamplingParams(max_tokens=1_000_000)
dealer.send(encode(Submit(request_id=str(os.getpid()), prompt="go", sampling=sampling)))
dealer.recv()
dealer.recv()
print("reading", flush=True)
time.sleep(600)
"""


def test_killed_clients_cost_the_engine_no_files_or_memory(serving: Serving, client: Client, folder: Path) -> None:
    """Steps are slow, so that little waits for a client before it is killed."""
    process = serving(step_s=0.05)
    client.wait_ready()

    def kill_clients(count: int) -> None:
        command = [sys.executable, "-c", CLIENT, str(folder)]
        clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        for each in clients:
            assert each.stdout is not None
            assert each.stdout.readline() == "reading\n"
            each.kill()
            each.communicate()
        killed_ns = time.monotonic_ns()  # earlier heartbeats between the two are still unread
        client.telemetry(Heartbeat, lambda beat: beat.time_ns > killed_ns and beat.num_unfinished == 0)

    def use() -> tuple[int, int]:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        return len(os.listdir(f"/proc/{process.pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE")

    kill_clients(2)
    files, num_bytes = use()
    kill_clients(6)
    deadline = time.monotonic() + 60
    while use()[0] > files:
        assert time.monotonic() < deadline, f"{use()[0]} files are open, {files} were"
        time.sleep(0.01)
    assert use()[1] - num_bytes < 8 << 20


def test_suspended_clients_slow_no_other_client(serving: Serving, client: Client, folder: Path) -> None:
    process = serving()
    client.wait_ready()
    with subprocess.Popen([sys.executable, "-c", CLIENT, str(folder)], stdout=subprocess.PIPE, text=True) as stalled:
        assert stalled.stdout is not None
        assert stalled.stdout.readline() == "reading\n"  # it reads nothing from here on
        stalled.send_signal(signal.SIGSTOP)
        try:
            sampling = SamplingParams(max_tokens=20_000)
            client.run(Submit(request_id="a", prompt="p", sampling=sampling))
            assert int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096 < 160 << 20
        finally:
            stalled.kill()


# The parent


PARENT = """
import os, subprocess, sys, time
command = [sys.executable, sys.argv[1], sys.argv[2], f"exit_with_parent={os.getpid()}", *sys.argv[3:]]
engine = subprocess.Popen(command, stdout=subprocess.DEVNULL)
print(engine.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("load_s", [0, 600])
def test_engine_does_not_outlive_its_desktop(folder: Path, client: Client, load_s: int) -> None:
    script = Path(__file__).with_name("fake_engine.py")
    command = [sys.executable, "-c", PARENT, str(script), f"ipc://{folder}", f"load_s={load_s}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        client.ask(GetStatus(), Status)
        parent.kill()
    wait_until_gone(pid)


def test_parent_that_died_before_the_first_check_is_noticed(serving: Serving) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    process = serving(exit_with_parent=gone.pid, load_s=600)
    process.wait(timeout=60)


def test_engine_outlives_its_parent_without_the_option(serving: Serving, client: Client) -> None:
    serving()
    client.wait_ready()
    assert isinstance(client.ask(Submit(request_id="e", prompt=""), Refused), Refused)
