"""Standard streams of a command: closed ones, readers that go away, terminals that lack a character."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

BROKEN_PIPE: Final = 1
"""Exit code of a command whose output nobody reads any more (`kvscope info FILE | head -1`)."""


@contextmanager
def ready_streams() -> Iterator[None]:
    """Make standard streams safe to print to, and end the process quietly when the reader of its output has gone.

    A stream that the caller closed (`>&-`) becomes /dev/null, and a character that the terminal cannot show is
    printed as its code. Raises SystemExit for a broken pipe.
    """
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # else Python does it at exit, outside of this
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(BROKEN_PIPE) from None


def _open_closed() -> None:
    """Without this the next file that is opened becomes the standard stream."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def _discard_output() -> None:
    """Python flushes both once more at exit, and would complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)
