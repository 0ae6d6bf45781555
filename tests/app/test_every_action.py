"""Test that triggers every action in a window, in both themes, at a scale factor of 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.processes import RUNS_ENGINE

from kvscope_engine.cli.main import build_parser

MIN_ACTIONS = 60
SCALE_FACTOR = 2


def test_every_action_raises_nothing_and_leaks_nothing(tmp_path):
    """Runs in its own process, because the scale factor and the counted objects are those of the process."""
    home = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "STATE")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.app.every_action", str(tmp_path), "dark", "light"],
        env=os.environ | home | {"QT_QPA_PLATFORM": "offscreen", "QT_SCALE_FACTOR": str(SCALE_FACTOR)},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["problems"] == []
    assert answer["warnings"] == []
    for words in answer["commands"] if RUNS_ENGINE else ():
        assert build_parser("plan").parse_args(words).lines
    assert answer["left"] == {}, "windows, widgets, timers, threads or objects of the second window leaked"
    for window in answer["windows"]:
        assert window["ratio"] == SCALE_FACTOR
        assert len(window["triggered"]) >= MIN_ACTIONS
        assert window["triggered"] == answer["windows"][0]["triggered"]
