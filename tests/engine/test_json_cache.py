"""Cached results in the cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope_engine.json_cache import CHECK_AGAIN, MAX_ENTRIES, read_entry, write_entry


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path))
    return tmp_path / "results"


def test_value_is_read_back_only_under_its_identity() -> None:
    write_entry("results", "model 1", {"passed": [1, None, "x"]})
    assert read_entry("results", "model 1") == {"passed": [1, None, "x"]}
    assert read_entry("results", "model 2") is None
    assert read_entry("others", "model 1") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"identity": "model 1"}', b"\xff", b"[" * 100_000])
def test_damaged_entry_is_reported_in_one_line_and_can_be_replaced(folder: Path, content: bytes) -> None:
    write_entry("results", "model 1", 1)
    (path,) = folder.iterdir()
    path.write_bytes(content)
    lines: list[str] = []
    assert read_entry("results", "model 1", lines.append) is None
    assert lines == [f"the cache file {str(path)!r} was damaged and is written again"]
    write_entry("results", "model 1", 2)
    assert read_entry("results", "model 1") == 2


def test_entries_are_ignored_if_everything_is_to_be_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry("results", "model 1", 1)
    monkeypatch.setenv(CHECK_AGAIN, "1")
    assert read_entry("results", "model 1") is None


def test_only_the_newest_entries_are_kept(folder: Path) -> None:
    for number in range(MAX_ENTRIES + 3):
        write_entry("results", f"model {number}", number)
    assert len(list(folder.iterdir())) == MAX_ENTRIES
    assert read_entry("results", f"model {MAX_ENTRIES + 2}") == MAX_ENTRIES + 2


def test_unusable_cache_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "file"))
    write_entry("results", "model 1", 1)
    assert read_entry("results", "model 1") is None
