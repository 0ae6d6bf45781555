"""Test that seeded random input on windows raises nothing, does not hang or crash, and leaks nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

KINDS = ("recording", "live", "compare")
NUM_SEEDS = 20 if os.environ.get("KVSCOPE_SOAK") else len(KINDS)
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.storm) for seed in range(1, NUM_SEEDS))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_input_raises_nothing_and_leaks_nothing(seed, tmp_path, storm, amount):
    kind, num_events = KINDS[seed % len(KINDS)], amount(storm(100, 200), 1000)
    home = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "STATE")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.app.window_storm", str(tmp_path), kind, str(seed), str(num_events)],
        env=os.environ | home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["problems"] == []
    assert answer["warnings"] == []
    assert answer["left"] == {}
    assert answer["num_events"] == num_events
    assert os.listdir(tmp_path / "tmp") == [], "temporary files were left"
