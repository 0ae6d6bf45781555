"""The benchmark of recordings makes a recording and measures it in its own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import recording
from benchmarks.command_line import run_benchmark

ROOT = Path(__file__).parents[2]


def run(*options: str) -> int:
    return run_benchmark(recording.__doc__, recording.add_arguments, recording.run, options)


def test_recording_benchmark_writes_a_recording_and_prints_its_measurements(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)  # the measuring process imports `benchmarks` from there
    small = ("--blocks", "100", "--rate", "20", "--jumps", "4", "--running", "2")
    assert run("--seconds", "3", *small, "--keep", str(tmp_path / "kept.mcap")) == 0
    printed = capfd.readouterr().out
    assert all(word in printed for word in ("3 s at 20 frames/s", "jumps", "saved", "hashes alone are"))


def test_one_file_for_several_lengths_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("--seconds", "3", "4", "--keep", str(tmp_path / "kept.mcap")) == 2
    assert "--keep FILE.mcap is not accepted with several" in capsys.readouterr().err
