"""Standard streams of a command that are closed or whose reader is gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = "import sys, time\nfrom kvscope_telemetry.standard_streams import ready_streams\nwith ready_streams():\n    "


def shell(body: str, redirection: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, BEGIN + body]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("lines", [1, 100_000])
def test_reader_that_has_gone_causes_no_message(lines: int) -> None:
    """A single line stays in Python's buffer until the end; many do not."""
    done = shell(f"time.sleep(0.3); [print('x') for _ in range({lines})]", "| true; echo ${PIPESTATUS[0]}")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_command_whose_reader_has_gone_prints_no_error() -> None:
    script = '"$0" -m kvscope_app.main info sample | true; echo ${PIPESTATUS[0]}'
    done = subprocess.run(["bash", "-c", script, sys.executable], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_stream_becomes_the_null_device(closed: str) -> None:
    body = "print(sys.stdout.encoding, sys.stdin.isatty(), sys.stderr.isatty()); sys.stderr.write('x'); sys.exit(7)"
    assert shell(body, closed).returncode == 7


def test_character_that_the_terminal_lacks_is_printed_as_its_code() -> None:
    body = "sys.stdout.reconfigure(encoding='ascii', errors='strict')\nwith ready_streams():\n    print('→')"
    assert shell(body, "").stdout == "\\u2192\n"
