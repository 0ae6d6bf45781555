"""Raises the limit on open files and connections of this process to the maximum allowed."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.operating_system import limit_of_open_files

NEEDED_FILES: Final = 4_096
"""Number of open files that the engine needs: its own files, the maximum number of connections, and connections
that are accepted before they can be refused.
"""
MAX_FILES: Final = 1 << 20


def raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit. Raises KvscopeError if that is not enough.

    ZeroMQ aborts the process when it runs out of file descriptors. With a low limit, any client could thus end the
    engine by opening connections.
    """
    limit = limit_of_open_files(MAX_FILES)
    if limit is not None and limit < NEEDED_FILES:
        raise KvscopeError(
            f"this process may open only {limit} files: at least {NEEDED_FILES} are needed (see ulimit -Hn)"
        )
