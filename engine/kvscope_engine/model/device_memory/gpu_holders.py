"""Queries the driver for the processes that hold memory of one GPU, and whether the GPU draws a display.

Values that the driver does not report are unknown. Identifies GPUs, and MIG instances, by UUID.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvscope_engine.model.device_memory.memory_plan import gib
from kvscope_engine.model.device_memory.paging import is_wsl
from kvscope_telemetry.devices.gpus import Gpus, bare_uuid
from kvscope_telemetry.messages.devices import Gpu

if TYPE_CHECKING:
    from kvscope_engine.model.platforms.device import SampledGpus

MAX_LISTED_PROCESSES: Final = 3
_ENGINE_PROGRAMS: Final = (b"kvscope-engine", b"kvscope_engine")


class GpuHolder(NamedTuple):
    pid: int
    name: str
    """Name of the process; empty if neither the driver nor the system reports it."""
    num_bytes: int | None
    """Bytes of GPU memory that the process holds; None if the driver does not report them."""

    @property
    def description(self) -> str:
        size = "" if self.num_bytes is None else f" {gib(self.num_bytes)}"
        return f"{self.name or 'a process'}{size} (pid {self.pid})"


class GpuHolders:
    """Queries other processes on the GPU with the given UUID (with or without prefix). `gpus` replaces the driver in
    tests.
    """

    def __init__(self, uuid: str, gpus: SampledGpus | None = None) -> None:
        self._uuid = bare_uuid(uuid)
        self._gpus = gpus or Gpus(used=(uuid,))

    def draws_display(self) -> bool | None:
        gpu = self._gpu()
        return None if gpu is None else gpu.display_active

    def others(self) -> tuple[GpuHolder, ...]:
        """Return the other processes on the GPU, those with the most memory first.

        Empty if this process is not in the driver's list. That happens in a container, where the process ids in the
        list are not those that a process sees, so the list would identify nothing.
        """
        gpu = self._gpu()
        processes = gpu.processes if gpu is not None else None
        if processes is None or all(process.pid != os.getpid() for process in processes):
            return ()
        return holders_of(gpu)

    def describe(self) -> str:
        """Describe the processes that hold memory now, on one line; empty if none is known."""
        return describe_holders(self.others())

    def describe_with_bytes(self) -> tuple[str, int]:
        """Return the text of `describe`, and the sum of the known bytes of these processes."""
        others = self.others()
        return describe_holders(others), sum(holder.num_bytes or 0 for holder in others)

    def _gpu(self) -> Gpu | None:
        if not self._uuid:
            return None
        return next((gpu for gpu in self._gpus.sample() if bare_uuid(gpu.uuid) == self._uuid and not gpu.fault), None)


def is_drawing(display_active: bool | None) -> bool:
    """Whether a GPU draws a display. `display_active` is what the driver reports. If it is None, a GPU under
    WSL is assumed to draw a display.
    """
    return is_wsl() if display_active is None else display_active


def holders_of(gpu: Gpu | None) -> tuple[GpuHolder, ...]:
    """Return the processes on a GPU except this one, those with the most memory first."""
    processes = [
        process for process in (gpu.processes if gpu is not None else None) or () if process.pid != os.getpid()
    ]
    return tuple(GpuHolder(p.pid, _name(p.pid, p.name), p.used_bytes) for p in processes)


def grown(holders: Iterable[GpuHolder], before: Mapping[int, int]) -> list[GpuHolder]:
    """Return the processes that hold more memory than before, with the increase as their size, largest first.

    `before`: bytes by process id. Processes of unknown size come last.
    """
    changes = (
        h._replace(num_bytes=None if h.num_bytes is None else h.num_bytes - before.get(h.pid, 0)) for h in holders
    )
    more = [h for h in changes if (h.num_bytes is None and h.pid not in before) or (h.num_bytes or 0) > 0]
    return sorted(more, key=lambda h: -(h.num_bytes or 0))


def describe_holders(holders: Iterable[GpuHolder]) -> str:
    """Describe the first `MAX_LISTED_PROCESSES` processes on one line, and the number of others; empty without any."""
    listed = list(holders)
    num_more = len(listed) - MAX_LISTED_PROCESSES
    return ", ".join(
        [h.description for h in listed[:MAX_LISTED_PROCESSES]] + ([f"and {num_more} more"] if num_more > 0 else [])
    )


def _name(pid: int, name: str, folder: Path = Path("/proc")) -> str:
    """Return the name of a process. The driver reports kvscope engines only as "python", so they are recognized by
    command.
    """
    try:
        command = (folder / str(pid) / "cmdline").read_bytes()
    except OSError:
        return name
    return "another kvscope engine" if any(program in command for program in _ENGINE_PROGRAMS) else name
