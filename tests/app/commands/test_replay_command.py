"""Tests that `kvscope replay` passes its arguments to the engine and returns its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope_app.main import main
from kvscope_telemetry.recordings.sample import sample_recording


def test_replay_prints_the_error_of_the_engine_for_a_missing_recording(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "gone.mcap"
    assert main(["replay", str(missing), "--max-num-seqs", "1"]) == 2
    assert capfd.readouterr().err.startswith(f"kvscope: recording {str(missing)!r}")


def test_replay_of_a_nondeterministic_recording_prints_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(sample_recording())]) == 2
    assert "its engine was not deterministic; start the engine with --deterministic" in capfd.readouterr().err
