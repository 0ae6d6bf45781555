"""Division of a device's memory between the engine, other processes, the driver and free memory. Imports no Qt.

All values are from one sample. If all are known, `total = engine + others + reserved + free`, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvscope_telemetry.messages.devices import Devices, Gpu, Host
from kvscope_telemetry.messages.telemetry import DeviceSample, Hello


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Bytes of a device's memory by user. A value is None if it is unknown."""

    total: int | None = None
    free: int | None = None
    reserved: int | None = None
    """Bytes that the driver and the firmware reserve for themselves."""
    engine: int | None = None
    others: int | None = None

    @property
    def used_by_engine(self) -> int | None:
        """Bytes that the breakdown of the engine's memory must explain.

        If the engine's own memory is unknown, this includes the memory of other processes.
        """
        if self.engine is not None:
            return self.engine
        if self.total is None or self.free is None:
            return None
        return self.total - self.free - (self.reserved or 0)


def device_use(hello: Hello | None, devices: Devices | None, sample: DeviceSample | None) -> DeviceUse:
    """Return the division of memory from the detailed sample `devices` or, if that has no values, from `sample`."""
    total_bytes = hello.device.total_bytes or None if hello is not None else None
    if hello is not None and devices is not None:
        gpu = next((gpu for gpu in devices.gpus if gpu.index in devices.used_gpus[:1]), None)
        use = _gpu_use(gpu, hello.pid) if gpu is not None else None
        if hello.device.kind != "cuda" and devices.host is not None:
            use = _host_use(devices.host, hello.pid)
        if use is not None:
            return use
    return _sample_use(sample, total_bytes)


def _gpu_use(gpu: Gpu, pid: int) -> DeviceUse | None:
    total, free, reserved = gpu.memory_total_bytes, gpu.memory_free_bytes, gpu.memory_reserved_bytes
    if total is None or free is None:
        return None
    engine = next((process.used_bytes for process in gpu.processes or () if process.pid == pid), None)
    others = total - free - (reserved or 0) - engine if engine is not None else None
    return DeviceUse(total, free, reserved, engine, others)


def _host_use(host: Host, pid: int) -> DeviceUse | None:
    """Return the division of host memory, or None if the sample is incomplete.

    The operating system counts files that the engine maps as available, because it could reclaim them. Here they count
    as the engine's memory.
    """
    total, available = host.memory_total_bytes, host.memory_available_bytes
    process = next((process for process in host.processes or () if process.pid == pid), None)
    if total is None or available is None or process is None or process.resident_bytes is None:
        return None
    files = min(process.file_bytes or 0, available)
    free = available - files
    return DeviceUse(total, free, None, process.resident_bytes, total - free - process.resident_bytes)


def _sample_use(sample: DeviceSample | None, reported_total: int | None) -> DeviceUse:
    if sample is None:
        return DeviceUse(total=reported_total)
    total = _known(sample.memory_total_bytes) or reported_total
    used, engine = _known(sample.memory_used_bytes), _known(sample.process_bytes)
    return DeviceUse(
        total=total,
        free=total - used if total is not None and used is not None else None,
        engine=engine,
        others=used - engine if used is not None and engine is not None else None,
    )


def _known(value: int) -> int | None:
    """Convert -1, the protocol's value for unknown, to None."""
    return value if value >= 0 else None
