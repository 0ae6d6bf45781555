"""Raises the limit on open files and connections of this process to the maximum allowed."""

from __future__ import annotations

import resource
from typing import Final

from kvscope_telemetry.errors import KvscopeError

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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < NEEDED_FILES:
        raise KvscopeError(
            f"this process may open only {soft} files: at least {NEEDED_FILES} are needed (see ulimit -Hn)"
        )
