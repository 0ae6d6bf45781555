"""Lines on standard error about what went on, but not as it was asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def tell_notes(notes: Sequence[str]) -> None:
    """A line each."""
    for note in notes:
        tell_note(note)


def tell_note(note: str) -> None:
    """One line, at once."""
    print(f"kvscope-engine: {note}", file=sys.stderr, flush=True)
