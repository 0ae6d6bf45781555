"""What tests ask about their own process, and which of them cannot run on every system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import psutil
import pytest

from kvscope_telemetry.operating_system import fcntl

RUNS_ENGINE: Final = fcntl is not None
"""Whether the engine can be imported on this system. It needs Linux."""
needs_unix: Final = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs signals, users or file modes of Unix")


def make_named_pipe(path: Path) -> None:
    """Make a named pipe. Skips the test where the system has none."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    os.mkfifo(path, 0o600)


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def peak_resident_kib() -> int:
    """Return the largest resident memory of this process so far. Skips the test where the system does not report it."""
    resource = pytest.importorskip("resource")
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def num_open_files() -> int:
    """Return the number of open file descriptors; of handles on Windows."""
    process = psutil.Process()
    return int(process.num_fds() if hasattr(process, "num_fds") else process.num_handles())
