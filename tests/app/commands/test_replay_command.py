"""`kvscope replay` hands its words to the engine and gives its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope_app.main import main
from kvscope_telemetry.recordings.sample import sample_recording


def test_it_is_the_engine_that_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "gone.mcap"
    assert main(["replay", str(missing), "--max-num-seqs", "1"]) == 2
    assert capfd.readouterr().err.startswith(f"kvscope: recording {str(missing)!r}")


def test_a_recording_that_cannot_be_run_again_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(sample_recording())]) == 2
    assert "its engine was not deterministic; start the engine with --deterministic" in capfd.readouterr().err
