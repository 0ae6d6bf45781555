"""Sample recordings that are shipped with kvscope, and the short names that the command line accepts for them."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import BadInput

SAMPLE_TEXT: Final = "Open the sample recording: an engine under memory pressure"
HYBRID_TEXT: Final = "Open the sample recording of a hybrid model: attention and recurrent states"
SAMPLES: Final = {"sample": "sample.mcap", "sample-hybrid": "sample-hybrid.mcap"}
"""File name of each sample by its short name, which the command line accepts in place of a path."""


def sample_recording() -> Path:
    """Return the path of a one-minute recording of an engine whose pool is too small.

    It shows preemptions, swaps, evictions, copies and draft tokens.
    """
    return _path("sample")


def hybrid_recording() -> Path:
    """Return the path of a recording of a model with recurrent layers.

    It shows request states and prefix states, copied and evicted.
    """
    return _path("sample-hybrid")


def is_sample(path: Path | str) -> bool:
    return bool(sample_name(path))


def sample_name(path: Path | str) -> str:
    """Return the short name of the sample at `path`, or "" if it is not a sample."""
    return next((word for word in SAMPLES if Path(path) == _path(word)), "")


def path_of(word: str) -> str:
    """Return the path to open for `word`, a path or the short name of a sample. An existing file takes precedence over
    a sample.
    """
    return str(_path(word)) if word in SAMPLES and not Path(word).exists() else word


def named_recording(name: Path | str) -> Path:
    """Return the path of the recording named on a command line: a file, or a sample's short name.

    Raises:
        BadInput: The file does not exist; the message lists the accepted names.
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
        pass  # opening the file reports the error
    return path


def _path(word: str) -> Path:
    return Path(str(resources.files("kvscope_resources") / SAMPLES[word]))
