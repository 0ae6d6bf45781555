"""The recording that comes with kvscope. No Qt."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

SAMPLE_WORD: Final = "sample"
"""Instead of a file's name."""
SAMPLE_TEXT: Final = "Open the sample recording: an engine under memory pressure"


def sample_recording() -> Path:
    """An engine with too small a pool: preemptions, swaps, evictions, copies and drafts, within a minute."""
    return Path(str(resources.files("kvscope_resources") / "sample.mcap"))


def is_sample(path: Path | str) -> bool:
    """Whether the file is the sample, which is no person's own recording."""
    return Path(path) == sample_recording()


def path_of(word: str) -> str:
    """What to open where `word` was given: a file of that name comes first."""
    return str(sample_recording()) if word == SAMPLE_WORD and not Path(word).exists() else word
