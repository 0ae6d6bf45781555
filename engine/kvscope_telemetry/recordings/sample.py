"""The recordings that come with kvscope."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import BadInput

SAMPLE_TEXT: Final = "Open the sample recording: an engine under memory pressure"
HYBRID_TEXT: Final = "Open the sample recording of a hybrid model: attention and recurrent states"
SAMPLES: Final = {"sample": "sample.mcap", "sample-hybrid": "sample-hybrid.mcap"}
"""File names by the word that stands for the recording in place of a path."""


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
    return next((word for word in SAMPLES if Path(path) == _path(word)), "")


def path_of(word: str) -> str:
    """What to open where `word` was given: a file of that name comes first."""
    return str(_path(word)) if word in SAMPLES and not Path(word).exists() else word


def named_recording(name: Path | str) -> Path:
    """Return the path of the recording that a command line names: a file, or the word for a sample.

    Raises:
        BadInput: There is no such file; the message says what is accepted.
    """
    path = Path(path_of(str(name)))
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadInput(
            f"recording {str(name)!r} cannot be read: {error.strerror}; accepted are a recording's path (FILE.mcap or "
            f"FILE.mcap.part) and the words {' and '.join(SAMPLES)}"
        ) from None
    except (OSError, ValueError):
        pass  # opening it says what is wrong
    return path


def _path(word: str) -> Path:
    return Path(str(resources.files("kvscope_resources") / SAMPLES[word]))
