"""Measurements of all GPUs, the memory and the CPU cores of a machine, with one message per sample.

None means unknown (not supported by the driver, not permitted, or GPU lost); never zero. Owns the message types, their
units and their validation. The package `devices` reads the values.
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
    """A process that has allocated memory on a GPU. In a container, `pid` may be that of the host."""

    pid: int
    name: str = ""
    used_bytes: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    name: str = ""
    uuid: str = ""
    fault: str = ""
    """The driver's error message if the GPU does not respond; otherwise empty."""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    """Memory used by processes and contexts. Reserved memory is not included if the driver reports it separately."""
    memory_reserved_bytes: int | None = None
    """Memory reserved by the driver and the firmware."""
    memory_free_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    utilization: float | None = None
    """Share of time in which a kernel ran, 0 to 1."""
    memory_utilization: float | None = None
    """Share of time in which memory was read or written, 0 to 1."""
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    fan: float | None = None
    """Fan speed, 0 to 1; None for cards without a fan."""
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    throttled_by: tuple[str, ...] | None = None
    """Reasons for clocks below their maximum, by the names in `devices.throttling`; empty if not throttled."""
    ecc_corrected: int | None = None
    """Corrected memory errors since the driver was loaded."""
    ecc_uncorrected: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    """Number of PCIe lanes in use."""
    pcie_sent_bytes_s: int | None = None
    pcie_received_bytes_s: int | None = None
    nvlink_sent_bytes_s: int | None = None
    """Bytes per second sent over all NVLink connections of the GPU."""
    nvlink_received_bytes_s: int | None = None
    display_active: bool | None = None
    """Whether the GPU drives a display, so that windows use part of its memory."""


class HostProcess(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process in the host's memory. Its resident memory is the sum of anonymous, file and shared memory."""

    pid: int
    name: str = ""
    anonymous_bytes: int | None = None
    """Private memory: heap, stacks, tensors."""
    file_bytes: int | None = None
    """Mapped files (programs, libraries, weights), which the system can reclaim at any time."""
    shared_bytes: int | None = None
    swapped_bytes: int | None = None
    cores: float | None = None
    """CPU usage in cores; 1.0 means one core is fully used."""

    @property
    def resident_bytes(self) -> int | None:
        """Resident set size; None if any part of it is unknown."""
        parts = (self.anonymous_bytes, self.file_bytes, self.shared_bytes)
        return None if None in parts else sum(part or 0 for part in parts)


class Host(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory, CPU cores and processes of the machine, from its operating system."""

    name: str = ""
    """Model name of the CPU."""
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    """Memory that processes can get without swapping: free memory and most of the page cache."""
    memory_free_bytes: int | None = None
    cached_bytes: int | None = None
    """Size of the page cache and the kernel's buffers."""
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    cores: tuple[float, ...] | None = None
    """Utilization of each core since the previous sample, 0 to 1."""
    processes: tuple[HostProcess, ...] | None = None
    """The engine's processes, or those with the most memory; largest first."""


class Devices(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    epoch: int
    time_ns: int
    gpus: tuple[Gpu, ...] = ()
    """GPUs in the driver's order, including those that were lost."""
    host: Host | None = None
    fault: str = ""
    """The driver's error message if no GPU can be read; otherwise empty."""
    used_gpus: tuple[int, ...] = ()
    """`Gpu.index` of each GPU that the engine computes on, in the order of its ranks."""


def check_devices(devices: Devices) -> None:
    """Raise ProtocolError for values out of range, or implausibly many GPUs, processes or cores."""
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


def _check_length(noun: str, values: tuple[object, ...], limit: int) -> None:
    if len(values) > limit:
        raise ProtocolError(f"Devices: {len(values)} {noun} are more than {limit}")
