"""Cache entries of converted GGUF files: their paths, and the check whether one is intact.

Must not import torch, because processes that need only the tokenizer use this module.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from kvscope_engine.cache_folder import cache_folder
from kvscope_engine.model.loader.download.checksum import cached_sha256
from kvscope_engine.model.loader.gguf.split_files import parts_of

FORMAT_VERSION: Final = 3
"""Version of the conversion; increase it when the same file is converted differently."""
MANIFEST: Final = "manifest.json"
SAMPLE_BYTES: Final = 4096
NUM_SAMPLES: Final = 64


def entry_of(sha256: str, dtype: str) -> Path:
    return cache_folder() / "converted" / f"{sha256[:32]}-{dtype}-v{FORMAT_VERSION}"


def content_sha256(path: Path) -> str:
    """Return the checksum of a GGUF file, or of all parts if `path` is the first of several.

    Cached while the files are unchanged.
    """
    stamps = cache_folder() / "stamps"
    checksums = [cached_sha256(part, stamps) for part in parts_of(path)]
    return checksums[0] if len(checksums) == 1 else hashlib.sha256("".join(checksums).encode()).hexdigest()


def is_intact(entry: Path) -> bool:
    """Whether the entry exists and is unchanged, judged by samples of its files."""
    try:
        manifest = json.loads((entry / MANIFEST).read_bytes())
        return bool(manifest) and all(fingerprint(entry / name) == recorded for name, recorded in manifest.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def fingerprint(path: Path) -> str:
    """Return the file's size and a hash of samples at its start, its end and evenly between. Reads at most 260 KiB."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for index in range(NUM_SAMPLES + 1):
            file.seek(max(0, size - SAMPLE_BYTES) * index // NUM_SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return f"{size}:{digest.hexdigest()}"
