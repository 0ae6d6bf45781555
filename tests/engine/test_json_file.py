"""Files without a JSON object are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope_engine import json_file
from kvscope_engine.json_file import read_json
from kvscope_telemetry.errors import BadInput


def test_json_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": [1]}')
    assert read_json(tmp_path / "x.json") == {"a": [1]}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", b"\xff\xfe\x00", b"[" * 100_000, b'{"a": 1}x'])
def test_json_file_without_an_object_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        read_json(path)
    assert str(path) in str(refused.value)


def test_json_file_above_the_size_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    monkeypatch.setattr(json_file, "MAX_JSON_BYTES", 7)
    with pytest.raises(BadInput, match="larger than 7 bytes"):
        read_json(tmp_path / "x.json")


def test_missing_json_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_json(tmp_path / "x.json")
