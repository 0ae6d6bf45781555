"""Processor time of other processes, as the system tells it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from kvscope_app.session.session import Session


def process_cpu_s(pid: int) -> float:
    """Processor time that process `pid` took so far, NaN where it is not told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_of_rings_s(sessions: Iterable[Session]) -> float:
    """That of the processes which write what `sessions` keep, those that run now; 0 where nothing is told."""
    times = [process_cpu_s(pid) for pid in pids_of_rings(sessions)]
    return sum(seconds for seconds in times if not math.isnan(seconds))


def pids_of_rings(sessions: Iterable[Session]) -> list[int]:
    """The processes which write what `sessions` keep, those that run now."""
    pids = [session.kept.ring.pid for session in sessions if session.kept is not None]
    return [pid for pid in pids if pid]
