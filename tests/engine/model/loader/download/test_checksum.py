"""Checksums are right, and remembered only while the file is unchanged."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvscope_engine.model.loader.download import checksum
from kvscope_engine.model.loader.download.checksum import cached_sha256, sha256_of


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were read completely."""
    seen: list[Path] = []

    def counted(path: Path) -> str:
        seen.append(path)
        return sha256_of(path)

    monkeypatch.setattr(checksum, "sha256_of", counted)
    return seen


def test_checksum_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"kvscope" * 1000)
    assert sha256_of(tmp_path / "x") == hashlib.sha256(b"kvscope" * 1000).hexdigest()


def test_checksum_of_an_unchanged_file_is_cached(tmp_path: Path, reads: list[Path]) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"one")
    first = cached_sha256(file, tmp_path / "stamps")
    assert cached_sha256(file, tmp_path / "stamps") == first == hashlib.sha256(b"one").hexdigest()
    assert reads == [file]


@pytest.mark.parametrize("change", ["size", "time", "file"])
def test_checksum_of_a_changed_file_is_computed_again(tmp_path: Path, reads: list[Path], change: str) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"one")
    cached_sha256(file, tmp_path / "stamps")
    status = file.stat()
    if change == "file":
        (tmp_path / "other").write_bytes(b"two")
        os.replace(tmp_path / "other", file)
    else:
        file.write_bytes(b"three" if change == "size" else b"two")
    later = status.st_mtime_ns + (1_000_000 if change == "time" else 0)
    os.utime(file, ns=(status.st_atime_ns, later))
    assert cached_sha256(file, tmp_path / "stamps") == hashlib.sha256(file.read_bytes()).hexdigest()
    assert len(reads) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff"])
def test_damaged_checksum_cache_is_ignored(tmp_path: Path, reads: list[Path], damage: bytes) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"one")
    digest = cached_sha256(file, tmp_path / "stamps")
    next((tmp_path / "stamps").iterdir()).write_bytes(damage)
    assert cached_sha256(file, tmp_path / "stamps") == digest
    assert len(reads) == 2


def test_checksum_is_not_remembered_without_a_folder(tmp_path: Path) -> None:
    file, stamps = tmp_path / "file", tmp_path / "stamps"
    file.write_bytes(b"content")
    stamps.write_bytes(b"a file where a folder is needed")
    assert cached_sha256(file, stamps) == sha256_of(file)
