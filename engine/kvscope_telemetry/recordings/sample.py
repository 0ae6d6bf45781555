"""The recordings that come with kvscope."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

SAMPLE_TEXT: Final = "Open the sample recording: an engine under memory pressure"
HYBRID_TEXT: Final = "Open the sample recording of a hybrid model: attention and recurrent states"
_FILES: Final = {"sample": "sample.mcap", "sample-hybrid": "sample-hybrid.mcap"}
"""By the word that stands for it in place of a file's name."""


def sample_recording() -> Path:
    """An engine with too small a pool: preemptions, swaps, evictions, copies and drafts, within a minute."""
    return _path("sample")


def hybrid_recording() -> Path:
    """A model with recurrent layers: states of requests, those that are kept for prefixes, copied and evicted."""
    return _path("sample-hybrid")


def is_sample(path: Path | str) -> bool:
    """Whether the file is a sample, which is no person's own recording."""
    return bool(sample_word(path))


def sample_word(path: Path | str) -> str:
    """What stands for the file in place of its name; empty where it is no sample."""
    return next((word for word in _FILES if Path(path) == _path(word)), "")


def path_of(word: str) -> str:
    """What to open where `word` was given: a file of that name comes first."""
    return str(_path(word)) if word in _FILES and not Path(word).exists() else word


def _path(word: str) -> Path:
    return Path(str(resources.files("kvscope_resources") / _FILES[word]))
