"""Reads from the driver who has memory of one GPU, and whether it draws a display. What it does not tell is unknown.

Owns the words for those who hold it. Knows GPUs by their UUID, instances of MIG too.
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

MOST_NAMED: Final = 3
_ENGINE: Final = (b"kvscope-engine", b"kvscope_engine")


class GpuHolder(NamedTuple):
    """A process that has memory of a GPU."""

    pid: int
    name: str
    """Empty where neither driver nor system tells."""
    num_bytes: int | None

    @property
    def words(self) -> str:
        """As a person is told."""
        size = "" if self.num_bytes is None else f" {gib(self.num_bytes)}"
        return f"{self.name or 'a process'}{size} (pid {self.pid})"


class GpuHolders:
    """Of the GPU with that UUID, of whatever prefix; `gpus` is asked in place of the driver."""

    def __init__(self, uuid: str, gpus: SampledGpus | None = None) -> None:
        self._uuid = bare_uuid(uuid)
        self._gpus = gpus or Gpus(used=(uuid,))

    def draws_display(self) -> bool | None:
        """Whether windows have memory of it; None: the driver does not tell."""
        gpu = self._gpu()
        return None if gpu is None else gpu.display_active

    def others(self) -> tuple[GpuHolder, ...]:
        """Processes but this one, those with the most memory first. None where this one is not among those told of: a
        container's numbers are others than the driver's, and anybody may be meant."""
        gpu = self._gpu()
        processes = gpu.processes if gpu is not None else None
        if processes is None or all(process.pid != os.getpid() for process in processes):
            return ()
        return holders_of(gpu)

    def words(self) -> str:
        """Those that hold it now; empty: nobody is told of."""
        return holders_words(self.others())

    def told(self) -> tuple[str, int]:
        """The same, and the bytes that are known of all of them."""
        others = self.others()
        return holders_words(others), sum(holder.num_bytes or 0 for holder in others)

    def _gpu(self) -> Gpu | None:
        if not self._uuid:
            return None
        return next((gpu for gpu in self._gpus.sample() if bare_uuid(gpu.uuid) == self._uuid and not gpu.fault), None)


def is_drawing(display_active: bool | None) -> bool:
    """As a driver tells it; where it does not, a GPU of Windows draws a display."""
    return is_wsl() if display_active is None else display_active


def holders_of(gpu: Gpu | None) -> tuple[GpuHolder, ...]:
    """Processes on a GPU but this one, those with the most memory first."""
    told = [process for process in (gpu.processes if gpu is not None else None) or () if process.pid != os.getpid()]
    return tuple(GpuHolder(p.pid, _name(p.pid, p.name), p.used_bytes) for p in told)


def grown(holders: Iterable[GpuHolder], before: Mapping[int, int]) -> list[GpuHolder]:
    """Those with more memory than they had, by what came; `before`: bytes by process. Unknown sizes come last."""
    came = (h._replace(num_bytes=None if h.num_bytes is None else h.num_bytes - before.get(h.pid, 0)) for h in holders)
    more = [h for h in came if (h.num_bytes is None and h.pid not in before) or (h.num_bytes or 0) > 0]
    return sorted(more, key=lambda h: -(h.num_bytes or 0))


def holders_words(holders: Iterable[GpuHolder]) -> str:
    """The largest of them, in one line; empty without any."""
    told = list(holders)
    left = len(told) - MOST_NAMED
    return ", ".join([h.words for h in told[:MOST_NAMED]] + ([f"and {left} more"] if left > 0 else []))


def _name(pid: int, name: str, folder: Path = Path("/proc")) -> str:
    """An engine of ours by what it is, for the driver would say python."""
    try:
        command = (folder / str(pid) / "cmdline").read_bytes()
    except OSError:
        return name
    return "another kvscope engine" if any(word in command for word in _ENGINE) else name
