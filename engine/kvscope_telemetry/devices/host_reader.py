"""Reads the machine's memory, cores and processes from `/proc`. Values that cannot be read are unknown (None).

Owns the previous CPU times, to compute fractions of busy time. `folder` is `/proc`, or a test's directory.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvscope_telemetry.devices.optional_values import known
from kvscope_telemetry.devices.processes import Processes
from kvscope_telemetry.messages.devices import MAX_CORES, Host

KIB: Final = 1024
_MAX_NAME: Final = 80


class HostReader:
    """Samples the host. `pids` are the processes whose memory is reported; None means the `num_largest` processes."""

    def __init__(
        self,
        pids: tuple[int, ...] | None,
        *,
        num_largest: int = 16,
        folder: Path = Path("/proc"),
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._folder = folder
        self._processes = Processes(pids, num_largest, folder, clock_ns)
        self._name = known(self._processor) or platform.machine()
        self._times: dict[str, tuple[int, int]] = {}

    def sample(self) -> Host:
        memory = known(self._memory) or {}

        def total_of(*names: str) -> int | None:
            return sum(memory[name] for name in names) if all(name in memory for name in names) else None

        swap_total, swap_free = total_of("SwapTotal"), total_of("SwapFree")
        return Host(
            name=self._name,
            memory_total_bytes=total_of("MemTotal"),
            memory_available_bytes=total_of("MemAvailable"),
            memory_free_bytes=total_of("MemFree"),
            cached_bytes=total_of("Cached", "Buffers", "SReclaimable"),
            swap_total_bytes=swap_total,
            swap_used_bytes=max(0, swap_total - swap_free)
            if swap_total is not None and swap_free is not None
            else None,
            cores=known(self._cores),
            processes=self._processes.sample(),
        )

    def _memory(self) -> dict[str, int]:
        lines = (self._folder / "meminfo").read_text(encoding="ascii").splitlines()
        pairs = (line.split(":", 1) for line in lines if ":" in line)
        return {name: int(value.split()[0]) * KIB for name, value in pairs}

    def _cores(self) -> tuple[float, ...] | None:
        """Return for each core the fraction of time for which it was busy since the previous sample, or since
        boot in the first sample.
        """
        shares = []
        for line in (self._folder / "stat").read_text(encoding="ascii").splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name != "cpu":
                shares.append(self._share(name, [int(field) for field in fields[:8]]))
        return tuple(shares[:MAX_CORES]) or None

    def _share(self, name: str, times: list[int]) -> float:
        idle, total = times[3] + times[4], sum(times)
        idle_before, total_before = self._times.get(name, (0, 0))
        self._times[name] = idle, total
        passed = total - total_before
        return min(1.0, max(0.0, 1 - (idle - idle_before) / passed)) if passed > 0 else 0.0

    def _processor(self) -> str | None:
        with open(self._folder / "cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            return next(names, "")[:_MAX_NAME] or None


def own_process() -> tuple[int, ...]:
    """Return a tuple with the pid of this process, to be passed as `pids` by an engine that reports its own memory."""
    return (os.getpid(),)
