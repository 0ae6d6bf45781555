"""`kvscope inside`: runs a fake vLLM, and refuses in one line what could not be watched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import needs_unix

from kvscope_app.commands.host_command import find_command
from kvscope_app.main import main
from kvscope_telemetry.transport.bind_address import parse_bind_address
from kvscope_telemetry.transport.endpoint_lock import EndpointLock

KVSCOPE = "import sys; from kvscope_app.entry import main; sys.exit(main())"
HEAVY = ("PySide6", "pyqtgraph", "torch", "triton", "transformers", "kvscope_engine", "httpx")
SERVER = """import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
print(*sys.argv[1:], os.environ["KVSCOPE_INSIDE"], os.environ.get("VLLM_PLUGINS"), os.getpid(), flush=True)
if "wait" in sys.argv:
    signal.pause()
sys.exit(3)
"""

Write = Callable[..., None]
pytestmark = needs_unix


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Function that writes an executable file into the folder `bin`."""

    def write_executable(name: str, text: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    return write_executable


@pytest.fixture
def fake_vllm(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `vllm` in PATH, with a package of this name. Returns the folder for endpoints."""
    write("vllm", f"#!{sys.executable}\n{SERVER}")
    package = tmp_path / "site/vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "server.py").write_text(SERVER)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/site:{':'.join(sys.path)}")
    monkeypatch.delenv("KVSCOPE_INSIDE", raising=False)
    return tmp_path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KVSCOPE, "inside", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("start", ["vllm", f"{sys.executable} -m vllm.server"])
def test_server_gets_its_own_options_and_the_endpoint_and_returns_its_exit_code(fake_vllm: Path, start: str) -> None:
    endpoint = f"ipc://{fake_vllm}/e"
    done = run("--endpoint", endpoint, *start.split(), "serve", "MODEL", "--help", "--endpoint", "x")
    assert done.stdout.startswith(f"serve MODEL --help --endpoint x {endpoint} None ")
    assert done.stderr == f"kvscope: watch vLLM with: kvscope --attach {endpoint}\n"
    assert done.returncode == 3


def test_each_data_parallel_rank_is_named_and_the_list_of_plugins_extended(
    fake_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSCOPE_INSIDE", f"ipc://{fake_vllm}/e")
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    done = run("vllm", "serve", "MODEL", "--data_parallel_size=2")
    assert f"--attach ipc://{fake_vllm}/e --attach ipc://{fake_vllm}/e-1\n" in done.stderr
    assert "lora_resolver,kvscope" in done.stdout


def test_signal_reaches_the_server_which_is_the_same_process(fake_vllm: Path) -> None:
    command = [sys.executable, "-c", KVSCOPE, "inside", "--endpoint", f"ipc://{fake_vllm}/e", "--", "vllm", "wait"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().split()[-1] == str(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 7


def test_command_imports_nothing_of_the_desktop_and_no_torch(fake_vllm: Path) -> None:
    program = (
        "import os, sys\nfrom kvscope_app.main import main\n"
        f"os.execve = lambda *_: print(sorted(set({HEAVY!r}) & set(sys.modules)))\n"
        f"main(['inside', '--endpoint', 'ipc://{fake_vllm}/e', 'vllm', 'serve', 'MODEL'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stdout == "[]\n"


def test_endpoint_that_another_engine_uses_is_refused(fake_vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = parse_bind_address(second := f"ipc://{fake_vllm}/e-1")
    lock = EndpointLock(address.folder, second)  # type: ignore[union-attr]
    try:
        code = main(["inside", "--endpoint", f"ipc://{fake_vllm}/e", "vllm", "serve", "MODEL", "-dp", "2"])
    finally:
        lock.release()
    assert code == 1
    assert capsys.readouterr().err == (
        f"kvscope: endpoint {second} is in use by another engine (pid {os.getpid()}): stop it, or choose another\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "COMMAND is missing: such as `kvscope inside vllm serve MODEL`"),
        ("wllm serve", "'wllm' was not found: must be a program in PATH"),
        ("sglang serve", "'sglang' was not found: install it, or activate the environment that has it"),
        ("--endpoint 7000 vllm", "endpoint '7000' is not accepted: ipc:///DIR or tcp://HOST:PORT"),
        ("--endpoint tcp://127.0.0.1:0 vllm", "endpoint 'tcp://127.0.0.1:0' is not accepted: name the port, because"),
        ("PYTHON -m vllm.server", "vLLM is not installed for FOLDER/bin/python3.11: name the Python that has it"),
        ("vllm serve MODEL", "kvscope is not installed beside vLLM, so it would not load the plugin: run `FOLDER/bin/"),
    ],
)
def test_command_that_could_not_be_watched_is_refused_in_one_line(
    fake_vllm: Path, write: Write, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    write("python3.11", "#!/bin/sh\necho '[false, false]'\n")
    write("python3.12", "#!/bin/sh\necho '[true, false]'\n")
    write("vllm", f"#!/bin/sh\n'''exec' \"{fake_vllm}/bin/python3.12\" \"$0\" \"$@\"\n' '''\n")
    given = words.replace("PYTHON", f"{fake_vllm}/bin/python3.11").split()
    endpoint = [] if "--endpoint" in given or not given else ["--endpoint", f"ipc://{fake_vllm}/e"]
    assert main(["inside", *endpoint, *given]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"kvscope: {message.replace('FOLDER', str(fake_vllm))}")


@pytest.mark.parametrize("quote", ['"', "'", ""])
def test_python_of_a_script_of_pip_is_found_in_its_second_line(fake_vllm: Path, write: Write, quote: str) -> None:
    python = f"/my{' ' if quote else '-'}env/bin/python3"
    write("vllm", f"#!/bin/sh\n'''exec' {quote}{python}{quote} \"$0\" \"$@\"\n' '''\n")
    assert find_command(["vllm", "serve"], os.environ).python == python


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("vllm serve MODEL", range(1)),
        ("vllm serve MODEL --data-parallel-size 8 --data-parallel-size-local 2 -dpr 4", range(4, 6)),
        ("vllm serve MODEL --data-parallel-size 8 --data-parallel-rank 3", range(3, 4)),
        ("vllm serve MODEL --data-parallel-size many", range(1)),
        ("python3 -m sglang.launch_server --dp 4", range(4)),
        ("env vllm serve MODEL -dp 2", range(1)),
    ],
)
def test_ranks_are_those_that_the_options_name(fake_vllm: Path, words: str, ranks: range) -> None:
    assert find_command(words.split(), os.environ).ranks == ranks
