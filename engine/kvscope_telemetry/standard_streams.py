"""Prepares a command's standard streams, so that closed streams, closed pipes, and characters that the terminal
cannot show cause no errors.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

BROKEN_PIPE: Final = 1
"""Exit code of a command whose output pipe was closed by its reader (`kvscope info FILE | head -1`)."""


@contextmanager
def ready_streams() -> Iterator[None]:
    """Make the standard streams safe to print to. If the reader of the output has ended, the process ends quietly.

    A stream that the caller closed (`>&-`) becomes /dev/null, and a character that the terminal cannot show is printed
    as its code. Raises SystemExit for a broken pipe.
    """
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # otherwise Python flushes at exit, outside of this handler
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(BROKEN_PIPE) from None


def _open_closed() -> None:
    """Open closed standard streams as /dev/null. Otherwise, the next file to be opened would become the
    standard stream.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def _discard_output() -> None:
    """Redirect stdout and stderr to /dev/null, because Python flushes them again at exit and would report an error."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)
