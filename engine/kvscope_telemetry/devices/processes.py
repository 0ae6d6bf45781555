"""Reads the CPU use and memory of host processes from `/proc/PID`. A process that ends meanwhile is left out.

Owns the processes' CPU times at the previous sample, from which the number of cores in use is computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from kvscope_telemetry.devices.optional_values import known
from kvscope_telemetry.messages.devices import HostProcess

KIB: Final = 1024
_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Processes:
    """Samples the processes in `pids`, or the `num_largest` processes by resident memory if `pids` is None."""

    def __init__(
        self, pids: tuple[int, ...] | None, num_largest: int, folder: Path, clock_ns: Callable[[], int]
    ) -> None:
        self._pids = pids
        self._num_largest = num_largest
        self._folder = folder
        self._clock_ns = clock_ns
        self._times: dict[int, tuple[int, int]] = {}  # pid -> time in ns, total ticks

    def sample(self) -> tuple[HostProcess, ...] | None:
        """Return the processes, largest resident memory first; None if no process can be read."""
        pids = self._pids if self._pids is not None else known(self._largest_pids)
        if pids is None:
            return None
        found = [process for pid in pids if (process := known(partial(self._process, pid))) is not None]
        self._times = {process.pid: self._times[process.pid] for process in found if process.pid in self._times}
        if not found and self._pids is not None:
            return None
        return tuple(sorted(found, key=lambda process: -(process.resident_bytes or 0)))

    def _largest_pids(self) -> tuple[int, ...]:
        sizes = [(known(partial(self._pages, pid)) or 0, pid) for pid in self._pids_in_folder()]
        return tuple(pid for size, pid in sorted(sizes, reverse=True)[: self._num_largest] if size)

    def _pids_in_folder(self) -> Iterable[int]:
        return [int(name) for name in os.listdir(self._folder) if name.isdigit()]

    def _pages(self, pid: int) -> int:
        return int((self._folder / str(pid) / "statm").read_bytes().split()[1])

    def _process(self, pid: int) -> HostProcess:
        text = (self._folder / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
        status = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

        def size(name: str) -> int | None:
            return int(status[name].split()[0]) * KIB if name in status else None

        return HostProcess(
            pid=pid,
            name=status.get("Name", "").strip(),
            anonymous_bytes=size("RssAnon"),
            file_bytes=size("RssFile"),
            shared_bytes=size("RssShmem"),
            swapped_bytes=size("VmSwap"),
            cores=known(lambda: self._cores(pid)),
        )

    def _cores(self, pid: int) -> float | None:
        """Return the average number of cores that the process used since its previous sample; None at its
        first sample.
        """
        fields = (self._folder / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        ticks, now_ns = int(fields[11]) + int(fields[12]), self._clock_ns()
        before_ns, before = self._times.get(pid, (now_ns, ticks))
        self._times[pid] = now_ns, ticks
        if now_ns <= before_ns:
            return None
        return max(0, ticks - before) / _TICKS_A_SECOND / ((now_ns - before_ns) / 1e9)
