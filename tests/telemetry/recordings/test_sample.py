"""The recordings that come with kvscope."""

from pathlib import Path

import pytest

from kvscope_telemetry.recordings.sample import path_of, sample_recording


def test_sample_is_a_word_unless_there_is_such_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert path_of("sample") == str(sample_recording())
    (tmp_path / "sample").write_bytes(b"")
    assert path_of("sample") == "sample"
    assert path_of("x.mcap") == "x.mcap"
