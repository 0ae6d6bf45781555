"""Tests of the command `kvscope` in its own process, with a simulated engine over real sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from tests.simulated_engine.command import COMMAND

from kvscope_app.main import main
from kvscope_telemetry.termination import END_SIGNALS


@pytest.fixture
def endpoint(tmp_path_factory):
    """Address of a running simulated engine."""
    folder = tmp_path_factory.mktemp("k")
    command = [*COMMAND, "--endpoint", f"ipc://{folder}", "--until-eof"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("serving")
        yield f"ipc://{folder}/telemetry"
        process.stdin.close()
        process.stdout.read()


def run_kvscope(arguments, tmp_path, **environment):
    inherited = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")}
    inherited |= {"XDG_CONFIG_HOME": str(tmp_path), **environment}
    command = [sys.executable, "-m", "kvscope_app.main", *arguments]
    return subprocess.run(command, env=inherited, capture_output=True, text=True)


def test_window_opens_without_importing_torch_or_the_engine(endpoint, tmp_path):
    done = run_kvscope(
        ["--attach", endpoint],
        tmp_path,
        QT_QPA_PLATFORM="offscreen",
        KVSCOPE_STARTUP_PROBE=str(time.monotonic_ns()),
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["heavy_modules"] == []
    assert answer["first_expose_s"] > 0  # benchmarks/window_smoothness.py measures how long it takes


def test_missing_display_prints_one_line_and_exits_with_1(tmp_path):
    done = run_kvscope([], tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("kvscope: no display")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--block-size", "x"], ["top", "--nonsense"]])
def test_bad_usage_prints_one_line_and_exits_with_2(arguments, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("kvscope: ")
    assert len(printed.splitlines()) == 1


def test_debug_option_prints_the_traceback(capsys):
    assert main(["--debug", "--block-size", "x"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_importing_every_module_does_not_import_torch():
    code = (
        "import pkgutil, importlib, sys, kvscope_app\n"
        "for m in pkgutil.walk_packages(kvscope_app.__path__, 'kvscope_app.'): importlib.import_module(m.name)\n"
        "heavy = ('torch', 'triton', 'transformers', 'kvscope_engine', 'kvscope_kernels', 'httpx')\n"
        "heavy += ('prometheus_client',)\n"
        "print([n for n in heavy if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("number", END_SIGNALS[1:])
def test_signal_closes_the_window_saves_its_settings_and_leaves_no_history(endpoint, tmp_path, number):
    homes = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment = {**os.environ, "QT_QPA_PLATFORM": "offscreen", **homes}
    command = [sys.executable, "-m", "kvscope_app.main", "--attach", endpoint]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 240
        settings, histories = tmp_path / "kvscope" / "kvscope.ini", tmp_path / "kvscope" / "rings"
        while process.poll() is None and time.monotonic() < deadline and not list(histories.glob("*/*.mcap*")):
            time.sleep(0.05)
        process.send_signal(number)
        try:
            _, stderr = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0, stderr
    assert settings.exists()
    assert not list(histories.iterdir())
