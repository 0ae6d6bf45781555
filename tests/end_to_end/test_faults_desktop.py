"""Apps that are killed while recording or whose disk is full; `kills.py` and `full_disk.py` run all cases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.end_to_end import kills

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(3600)  # many starts of an app, possibly on a busy machine


def test_killed_app_leaves_recordings_that_open(storm: Callable[[int, int], int]) -> None:
    left, banner = kills.kill_often(storm(1, 2), seed=5, longest_s=1.0)
    assert len(left) == storm(1, 2)  # each was opened and recovered; how much was lost is measured on a quiet machine
    assert "ended unexpectedly" in banner


def run_full_disk(*parts: str) -> str:
    command = [sys.executable, "-m", "tests.end_to_end.full_disk", *parts]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 2:
        pytest.skip("no small disk can be mounted here")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_full_disk_completes_a_recording_of_the_window() -> None:
    assert run_full_disk("window").count("No space left on device; what came before is in") == 2


@pytest.mark.storm
def test_full_disk_completes_every_kind_of_recording() -> None:
    assert "No space left on device" in run_full_disk("past", "record", "serve")
