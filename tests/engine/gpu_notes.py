"""Notices of an engine on a GPU that tests treat as faults."""

from __future__ import annotations

from collections.abc import Iterable

FAULTS = ("CUDA graph", "not pinned", "a step failed")


def faults_in(notes: Iterable[str]) -> list[str]:
    """Return notices about graphs that were not captured, host memory that is not pinned, or failed steps."""
    return [note for note in notes if any(words in note for words in FAULTS)]
