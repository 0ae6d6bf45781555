"""A machine's figures of all its GPUs, its memory and its cores: one message for each sample.

None means not known: not supported by the driver, not allowed, or lost; never zero. Owns shapes and units; the package
`devices` reads the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec.structs import asdict

from kvscope_telemetry.errors import ProtocolError

MAX_GPUS: Final = 256
MAX_PROCESSES: Final = 4096
MAX_CORES: Final = 8192
_MAX_NUMBER: Final = (1 << 63) - 1


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that has memory on a GPU. In a container `pid` may be that of the host."""

    pid: int
    name: str = ""
    used_bytes: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU, as its driver tells it."""

    index: int
    name: str = ""
    uuid: str = ""
    fault: str = ""
    """Why it does not answer, in the driver's words; empty while it does."""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    """By processes and contexts; without what is reserved where that is told."""
    memory_reserved_bytes: int | None = None
    """By the driver and the firmware, for themselves."""
    memory_free_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    utilization: float | None = None
    """0 to 1: the part of the time that a kernel ran."""
    memory_utilization: float | None = None
    """0 to 1: the part of the time that memory was read or written."""
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    fan: float | None = None
    """0 to 1; a card that is cooled otherwise has none."""
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    throttled_by: tuple[str, ...] | None = None
    """Why clocks are below their highest, by the names of `devices.throttling`; empty: nothing holds them."""
    ecc_corrected: int | None = None
    """Errors in memory since the driver was loaded."""
    ecc_uncorrected: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    """Lanes."""
    pcie_sent_bytes_s: int | None = None
    """From the GPU, a second."""
    pcie_received_bytes_s: int | None = None
    nvlink_sent_bytes_s: int | None = None
    """Over all links."""
    nvlink_received_bytes_s: int | None = None
    display_active: bool | None = None
    """Whether it draws a display, so that windows have memory of it."""


class HostProcess(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process in the host's memory. Resident are the first three together."""

    pid: int
    name: str = ""
    anonymous_bytes: int | None = None
    """Its own: heap, stacks, tensors."""
    file_bytes: int | None = None
    """Files that it maps: programs, libraries, weights. The system can have them back at any time."""
    shared_bytes: int | None = None
    """Shared memory."""
    swapped_bytes: int | None = None
    cores: float | None = None
    """Cores that it used, 1.0: one of them all the time."""

    @property
    def resident_bytes(self) -> int | None:
        """All that it has in memory."""
        parts = (self.anonymous_bytes, self.file_bytes, self.shared_bytes)
        return None if None in parts else sum(part or 0 for part in parts)


class Host(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine itself, as its system tells it."""

    name: str = ""
    """Of its processor."""
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    """What processes can have without swapping: what is free, and most of what files take."""
    memory_free_bytes: int | None = None
    cached_bytes: int | None = None
    """Files kept in memory, with the system's own buffers."""
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    cores: tuple[float, ...] | None = None
    """0 to 1, how busy each of them was since the sample before."""
    processes: tuple[HostProcess, ...] | None = None
    """The engine's own, or those with the most memory; largest first."""


class Devices(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Every GPU and the host at one time."""

    epoch: int
    time_ns: int
    gpus: tuple[Gpu, ...] = ()
    """Those that are there and those that were, in the driver's order."""
    host: Host | None = None
    fault: str = ""
    """Why no GPU is told of, in the driver's words; empty where none is missing."""
    used_gpus: tuple[int, ...] = ()
    """`Gpu.index` of those that the engine computes on, in the order of its ranks."""


def check_devices(devices: Devices) -> None:
    """Raise ProtocolError for numbers that no machine has, and for more of anything than a machine holds."""
    _check_numbers("Devices", (devices.epoch, devices.time_ns, *devices.used_gpus))
    _check_length("GPUs", devices.gpus, MAX_GPUS)
    for gpu in devices.gpus:
        _check_struct(gpu)
        _check_processes(gpu.processes)
    if devices.host is not None:
        _check_struct(devices.host)
        _check_processes(devices.host.processes)
        _check_length("cores", devices.host.cores or (), MAX_CORES)
        _check_numbers("Host", devices.host.cores or ())


def _check_processes(processes: tuple[GpuProcess, ...] | tuple[HostProcess, ...] | None) -> None:
    _check_length("processes", processes or (), MAX_PROCESSES)
    for process in processes or ():
        _check_struct(process)


def _check_struct(part: msgspec.Struct) -> None:
    values = asdict(part).values()
    _check_numbers(type(part).__name__, [value for value in values if isinstance(value, int | float)])


def _check_numbers(where: str, values: Iterable[float]) -> None:
    for value in values:
        if not (math.isfinite(value) and 0 <= value <= _MAX_NUMBER):
            raise ProtocolError(f"{where}: {value} is negative, not a number or above 2^63")


def _check_length(what: str, values: tuple[object, ...], limit: int) -> None:
    if len(values) > limit:
        raise ProtocolError(f"Devices: {len(values)} {what} are more than {limit}")
