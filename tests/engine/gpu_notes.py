"""What an engine on a GPU notes that a test takes for a fault. On some cards it notes other things, too."""

from __future__ import annotations

from collections.abc import Iterable

FAULTS = ("CUDA graph", "not pinned", "a step failed")


def faults_in(notes: Iterable[str]) -> list[str]:
    """Those that tell of graphs that were not captured, host memory that is not pinned, or steps that failed."""
    return [note for note in notes if any(words in note for words in FAULTS)]
