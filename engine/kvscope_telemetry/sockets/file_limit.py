"""How many files and connections this process may have open: as many as it is allowed, and enough to begin."""

from __future__ import annotations

import resource
from typing import Final

from kvscope_telemetry.errors import KvscopeError

NEEDED_FILES: Final = 4_096
"""Connections at their most, those that are accepted before they can be refused, and the engine's own files."""
MAX_FILES: Final = 1 << 20


def raise_file_limit() -> None:
    """Raise the soft limit to the hard one. Raises KvscopeError when that is not enough.

    Out of descriptors ZeroMQ ends the process, so whoever may connect could.
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
