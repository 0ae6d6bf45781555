"""`kvscope-engine sample`: devices on a socket, in a process that never loads torch."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope_engine.cli.main import main

SCRIPT = """
import sys
from kvscope_engine.cli.main import main
code = main(sys.argv[1:])
print(code, [name for name in ("torch", "triton", "transformers", "PySide6") if name in sys.modules])
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_it_tells_until_it_is_stopped_and_loads_no_torch(folder: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, "sample", "--endpoint", f"ipc://{folder}/s", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == f"listening on ipc://{folder}/s/telemetry"
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=120)
    assert (said.strip(), errors) == ("0 []", "")


@pytest.mark.parametrize("interval", ["0", "0.01", "61", "nan", "often"])
def test_an_interval_that_makes_no_sense_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "--interval", interval]) == 2
    assert interval in capsys.readouterr().err


def test_outside_loopback_it_needs_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "--endpoint", "tcp://0.0.0.0:0", "--keyless"]) == 2
    assert "keys" in capsys.readouterr().err


def test_an_endpoint_in_use_is_refused_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvscope_engine.server.device_publisher import DevicePublisher

    with DevicePublisher(f"ipc://{folder}/s"):
        assert main(["sample", "--endpoint", f"ipc://{folder}/s"]) != 0
    assert "in use" in capsys.readouterr().err
