"""Every action of the registry in the real window, in both themes, at two pixels a point."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from kvscope_engine.cli.main import build_parser

ENOUGH = 60
"""Actions that there are at least."""
FACTOR = 2
"""Pixels a point."""


def test_every_action(tmp_path):
    """In a process of its own: what a window leaves is counted there, and the scale factor is the process's. All other
    tests have a pixel a point."""
    home = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "STATE")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.app.every_action", str(tmp_path), "dark", "light"],
        env=os.environ | home | {"QT_QPA_PLATFORM": "offscreen", "QT_SCALE_FACTOR": str(FACTOR)},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["problems"] == []
    assert answer["warnings"] == []
    for words in answer["commands"]:
        assert build_parser("plan").parse_args(words).lines
    assert answer["left"] == {}, "windows, widgets, timers, threads or objects of the second window stayed"
    for window in answer["windows"]:
        assert window["ratio"] == FACTOR
        assert len(window["triggered"]) >= ENOUGH
        assert window["triggered"] == answer["windows"][0]["triggered"]
