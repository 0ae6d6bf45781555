"""`ssh://`: an engine through a stand-in for `ssh` that forwards on this machine, and the messages of failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import needs_unix
from tests.telemetry.conftest import make_endpoint, serve

from kvscope_telemetry.addresses import Address
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.fleet_list import parse_list
from kvscope_telemetry.source import SourceState

WAIT_S = 60.0
__all__ = ["make_endpoint", "serve"]

FAKE = """#!{python}
import os, socket, sys, threading
words = sys.argv[1:]
open({log!r}, "a").write(" ".join(words) + "\\n")
if {failure!r}:
    sys.exit({failure!r})
host = words[words.index("--") + 1]
if "-N" not in words:
    print({default!r})
    sys.exit(0)
open({pids!r}, "a").write(f"{{os.getpid()}}\\n")

def pump(here, there):
    try:
        while data := here.recv(65536):
            there.sendall(data)
    except OSError:
        pass
    for each in (here, there):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def carry(listening, there):
    while True:
        here, _ = listening.accept()
        try:
            if there.startswith("/"):
                other = socket.socket(socket.AF_UNIX)
                other.connect(there)
            else:
                name, _, port = there.rpartition(":")
                other = socket.create_connection((name, int(port)))
        except OSError as error:
            print("channel 2: open failed: connect failed:", error.strerror, file=sys.stderr, flush=True)
            here.close()
            continue
        for pair in ((here, other), (other, here)):
            threading.Thread(target=pump, args=pair, daemon=True).start()

threads = []
for at, word in enumerate(words):
    if word == "-L":
        here, _, there = words[at + 1].partition(":")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(here)
        listening.listen()
        threads.append(threading.Thread(target=carry, args=(listening, there)))
for thread in threads:
    thread.start()
"""

FakeSsh = Callable[..., Path]


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    """Function that installs a stand-in for `ssh` and returns its log with one call per line: `fake_ssh(failure=…,
    default=…)`.
    """

    def make(failure: str = "", default: str = "none") -> Path:
        folder, log = tmp_path / "bin", tmp_path / "calls"
        folder.mkdir(exist_ok=True)
        pids = str(tmp_path / "pids")
        text = FAKE.format(python=sys.executable, log=str(log), failure=failure, default=default, pids=pids)
        (folder / "ssh").write_text(text)
        (folder / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return log

    return make


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_engine_is_watched_through_the_tunnel(
    fake_ssh: FakeSsh,
    serve: Callable,
    make_endpoint: Callable,
    kind: str,  # type: ignore[type-arg]
) -> None:
    log, endpoint = fake_ssh(), make_endpoint(kind)
    serve(endpoint)
    with Address(f"ssh://me@box:2222/{endpoint}").open() as source:
        assert source.wait(lambda: source.status.state is SourceState.LIVE, WAIT_S), source.status
    (call,) = log.read_text().splitlines()
    assert call.endswith("-- me@box")
    for option in ("-N", "-p 2222", "ExitOnForwardFailure=yes", "BatchMode=yes"):
        assert option in call
    await_end(log.parent / "pids")


def test_default_endpoint_is_found_on_the_remote_host(
    fake_ssh: FakeSsh,
    serve: Callable,
    make_endpoint: Callable,  # type: ignore[type-arg]
) -> None:
    endpoint = make_endpoint()
    fake_ssh(default=os.path.dirname(endpoint.removeprefix("ipc://")))
    serve(endpoint)
    with Address("ssh://box").open() as source:
        assert source.wait(lambda: source.status.state is SourceState.LIVE, WAIT_S), source.status


@pytest.mark.parametrize(
    ("failure", "address", "words"),
    [
        ("you@box: Permission denied (publickey).", "ssh://box", "ssh to box: you@box: Permission denied (publickey)."),
        ("", "ssh://box", "no engine listens at its default place on box"),
        ("", "ssh://box/nowhere/kvscope", "open failed: connect failed: No such file or directory"),
    ],
)
def test_ssh_failure_is_shown_with_its_message(fake_ssh: FakeSsh, failure: str, address: str, words: str) -> None:
    fake_ssh(failure)
    with Address(address).open() as source:
        assert source.wait(lambda: words in source.status.reason, WAIT_S), source.status
        assert source.status.state is SourceState.CONNECTING


@needs_unix
def test_tunnel_ends_with_a_killed_process(
    fake_ssh: FakeSsh,
    serve: Callable,
    make_endpoint: Callable,  # type: ignore[type-arg]
) -> None:
    log, endpoint = fake_ssh(), make_endpoint()
    serve(endpoint)
    program = (
        "import time\nfrom kvscope_telemetry import connect\nfrom kvscope_telemetry.source import SourceState\n"
        f"with connect('ssh://box/{endpoint}') as source:\n"
        f"    print(source.wait(lambda: source.status.state is SourceState.LIVE, {WAIT_S}), flush=True)\n"
        "    time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        process.send_signal(signal.SIGKILL)
    await_end(log.parent / "pids")
    here = log.read_text().partition(" -L ")[2].partition("/telemetry:")[0]
    assert here.startswith("/")
    assert not Path(here).exists(), "the temporary folder must be removed"


def await_end(pids: Path) -> None:
    """Wait until none of the processes runs."""
    deadline = time.monotonic() + WAIT_S
    for pid in map(int, pids.read_text().split()):
        while _runs(pid):
            assert time.monotonic() < deadline, "ssh still runs"
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ssh://", "ssh://[USER@]HOST"),
        ("ssh://-oProxyCommand=x", "is not accepted"),
        ("ssh://me@-oProxyCommand=x", "is not accepted"),
        ("ssh://box:0", "is not accepted"),
        ("ssh://box:99999", "is not accepted"),
        ("ssh://box/vllm://x:1", "ipc:///DIR or tcp://HOST:PORT"),
        ("ssh://box/a:b", "letters, digits"),
        ("ssh://box/tcp://127.0.0.1:0", "a port from 1"),
        ("ssh://box/tcp://10.0.0.5:7710", "without a key file"),
    ],
)
def test_invalid_ssh_address_is_named(fake_ssh: FakeSsh, address: str, words: str) -> None:
    fake_ssh()
    with pytest.raises(BadInput) as caught:
        Address(address).check()
    assert words in str(caught.value)


def test_missing_ssh_client_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="needs the OpenSSH client"):
        Address("ssh://box").check()


def test_fleet_list_accepts_an_ssh_address(fake_ssh: FakeSsh) -> None:
    fake_ssh()
    (entry,) = parse_list("ssh://me@box:22/tcp://127.0.0.1:7710   box one").entries
    assert entry.name == "box one"
    assert not entry.address.is_external
