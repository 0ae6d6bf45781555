"""Finding the command, one-line errors, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest

from kvscope_engine.cli import doctor
from kvscope_engine.cli.main import COMMANDS
from kvscope_telemetry.errors import EndpointInUse

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "no command given: use"),
        (("sevre",), "sevre"),
        (("serve", "--modle", "x"), "--modle"),
        (("serve", "--block-size", "many"), "'many'"),
        (("serve", "--block-size", "0"), "--block-size: '0'"),
        (("serve", "--device", "tpu"), "'tpu'"),
        (("serve", "--kv-memory", "-5"), "--kv-memory"),
        (("serve", "--kv-memory", "5 parsecs"), "'5 parsecs'"),
        (("serve", "--gpu-memory-utilization", "nan"), "--gpu-memory-utilization: 'nan'"),
        (("serve", "--endpoint", "http://x"), "'http://x'"),
        (("serve", "--endpoint", "tcp://0.0.0.0:5555", "--keyless", "viewer"), "tcp://0.0.0.0:5555"),
        (("serve", "--endpoint", "tcp://127.0.0.1:5555", "--keys", "/dev/null"), "/dev/null"),
        (("serve", "--block", "16"), "--block"),
        (("serve", "--http", "localhost"), "'localhost'"),
        (("bench", "nothing"), "'nothing'"),
        (("bench",), "NAME"),
        (("generate",), "no prompt given: use"),
    ],
)
def test_usage_error_is_one_line_and_exit_code_2(run: Run, words: tuple[str, ...], named: str) -> None:
    code, out, err = run(*words)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("kvscope-engine: ")
    assert named in err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (EndpointInUse("it is\nin use"), 1, "it is in use"),
        (MemoryError("no more"), 1, "MemoryError: no more"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            1,
            "torch is not installed, which the engine needs: pip install 'kvscope[engine]'",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failure_is_one_line_and_has_a_traceback_only_with_debug(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(doctor, "check_machine", fail)
    assert run("doctor") == (code, "", f"kvscope-engine: {line}\n")
    found, _, err = run("doctor", "--debug")
    assert found == code
    assert "Traceback" in err
    assert err.endswith(f"kvscope-engine: {line}\n")


def test_version_and_help_do_not_import_torch() -> None:
    program = (
        "import sys\n"
        "from kvscope_engine.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))\n"
    )
    for words in (["--version"], ["--help"], ["serve", "--help"], ["generate", "--help"], ["bench", "--help"]):
        found = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
        assert found.stdout.splitlines()[-1] == "[]", words
        if words == ["--version"]:
            assert found.stdout.splitlines()[0] == f"kvscope-engine {version('kvscope')}"


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_help_explains_every_option(command: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(command, "--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in ("--model", "--block-size", "--kv-memory", "--max-num-seqs", "--no-enable-prefix-caching"):
        assert option in text
    assert "(default: 16)" in text
    assert "(default: None)" not in text


def test_exit_code_is_kept_with_torch_imported() -> None:
    program = "import torch, sys; sys.argv[1:] = ['bench', 'nothing']; import runpy;"
    program += "runpy.run_module('kvscope_engine.cli.main', run_name='__main__')"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("kvscope-engine: bench 'nothing' is not known")


@pytest.mark.parametrize("words", [*((name,) for name in COMMANDS), ("bench", "memory")])
def test_no_option_shows_its_default_twice(
    words: tuple[str, ...], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(*words, "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert not re.search(r"\(default: [^)]*\) \(default", text)
