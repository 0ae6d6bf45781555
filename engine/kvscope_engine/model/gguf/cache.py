"""Converted GGUF files in the cache folder: one entry for each content and dtype, checked before use."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from kvscope_engine.model.fetching.cache_folder import cache_folder, exclusive, replace_folder, scratch_folder
from kvscope_engine.model.fetching.checksum import remembered_sha256
from kvscope_engine.model.fetching.progress import ProgressCallback
from kvscope_engine.model.gguf.convert import convert_gguf, recast
from kvscope_engine.model.gguf.entries import MANIFEST, entry_of, fingerprint, is_intact
from kvscope_engine.model.loading.device import dtype_name
from kvscope_telemetry.errors import KvscopeError


def converted_gguf(gguf: Path, dtype: torch.dtype, progress: ProgressCallback) -> Path:
    """Folder with the weights of `gguf` in `dtype`, converted when there is none or it is damaged.

    Raises BadInput when the file cannot be converted. Several processes may ask at once: one converts.
    """
    entry = entry_folder(remembered_sha256(gguf, cache_folder() / "stamps"), dtype)
    if is_intact(entry):
        return entry
    with exclusive(entry):
        if not is_intact(entry):
            _build(gguf, dtype, entry, progress)
    return entry


def entry_folder(sha256: str, dtype: torch.dtype) -> Path:
    """Where the entry of a file with this checksum belongs."""
    return entry_of(sha256, dtype_name(dtype))


def _build(gguf: Path, dtype: torch.dtype, entry: Path, progress: ProgressCallback) -> None:
    try:
        with scratch_folder(entry.parent) as scratch:
            new = scratch / entry.name
            new.mkdir()
            _fill(gguf, dtype, entry, new, progress)
            manifest = {path.name: fingerprint(path) for path in sorted(new.iterdir()) if path.name != MANIFEST}
            (new / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            replace_folder(new, entry)
    except OSError as error:
        reason = error.strerror or error
        raise KvscopeError(
            f"cannot write the converted model to {str(entry)!r}: {reason};"
            " make room or rights there, or name another folder with KVSCOPE_CACHE"
        ) from error


def _fill(gguf: Path, dtype: torch.dtype, entry: Path, new: Path, progress: ProgressCallback) -> None:
    exact = entry.with_name(entry.name.replace(dtype_name(dtype), "float32"))
    if exact != entry and is_intact(exact):
        recast(exact, dtype, new, gguf.name, progress)
    else:
        convert_gguf(gguf, dtype, new, progress)
