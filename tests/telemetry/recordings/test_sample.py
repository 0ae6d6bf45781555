"""The recordings that come with kvscope."""

from pathlib import Path

import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.sample import named_recording, path_of, sample_recording


def test_name_sample_opens_the_bundled_recording_unless_a_file_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert path_of("sample") == str(sample_recording())
    (tmp_path / "sample").write_bytes(b"")
    assert path_of("sample") == "sample"
    assert path_of("x.mcap") == "x.mcap"


def test_unknown_recording_name_is_refused_with_the_accepted_ones(tmp_path: Path) -> None:
    assert named_recording("sample") == sample_recording()
    for name in ("samples", str(tmp_path / "x.mcap")):
        with pytest.raises(BadInput) as caught:
            named_recording(name)
        assert str(caught.value) == (
            f"recording {name!r} cannot be read: No such file or directory; accepted are a recording's path (FILE.mcap "
            "or FILE.mcap.part) and the words sample and sample-hybrid"
        )
