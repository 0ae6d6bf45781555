"""Prints notes to standard error: what succeeded, but not as it was asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_notes(notes: Sequence[str]) -> None:
    """A line each."""
    for note in notes:
        print_note(note)


def print_note(note: str) -> None:
    """One line, at once."""
    print(f"kvscope-engine: {note}", file=sys.stderr, flush=True)
