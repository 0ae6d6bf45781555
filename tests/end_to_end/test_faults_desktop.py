"""A desktop that is killed while it records, and one whose disk is full; `kills.py` and `full_disk.py` do all of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.end_to_end import kills

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(3600)  # many starts of a desktop, on a machine as busy as can be


def test_a_killed_desktop_leaves_recordings_that_open(storm: Callable[[int, int], int]) -> None:
    left, banner = kills.kill_often(storm(1, 2), seed=5, longest_s=1.0)
    assert len(left) == storm(1, 2)  # each was opened and made whole; how much was lost is for a quiet machine to say
    assert "ended unexpectedly" in banner


def fill(*parts: str) -> str:
    command = [sys.executable, "-m", "tests.end_to_end.full_disk", *parts]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 2:
        pytest.skip("no small disk can be mounted here")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_full_disk_ends_a_recording_of_the_window_whole() -> None:
    assert fill("window").count("No space left on device; what came before is in") == 2


@pytest.mark.storm
def test_every_recording_on_a_full_disk() -> None:
    assert "No space left on device" in fill("past", "record", "serve")
