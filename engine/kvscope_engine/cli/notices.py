"""Prints notices to standard error, one line each, about features that run otherwise than configured."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvscope_telemetry.printable import print_line


def print_notices(notes: Sequence[str]) -> None:
    for note in notes:
        print_notice(note)


def print_notice(note: str) -> None:
    print_line(f"kvscope-engine: {note}", file=sys.stderr)
