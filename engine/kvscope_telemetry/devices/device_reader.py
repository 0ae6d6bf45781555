"""Extracts the values of one device and one process from a sample of the whole machine, for clients that show one
device.

Unknown values are -1, never 0. Must not depend on the engine or torch.
"""

from __future__ import annotations

import os

from kvscope_telemetry.messages.devices import Devices, Gpu, Host
from kvscope_telemetry.messages.telemetry import DeviceSample, Hello


def device_sample(devices: Devices, hello: Hello, pid: int | None = None) -> DeviceSample:
    """Return the values of the GPU that the engine uses, or of the host if it uses none.

    `pid` is the engine's process; None means this process. If only devices are watched and no engine, the values of the
    host include none of a process.
    """
    pid = os.getpid() if pid is None else pid
    if hello.device.kind != "cuda":
        return _host_sample(devices, devices.host or Host(), pid if is_engine_share(hello) else None)
    return _gpu_sample(devices, used_gpu(devices) or Gpu(index=0), pid)


def is_engine_share(hello: Hello) -> bool:
    """Return whether `DeviceSample.utilization` is the engine's share of all CPUs, instead of how busy the
    device is.
    """
    return hello.device.kind != "cuda" and hello.capabilities.blocks


def busy_share(host: Host) -> float | None:
    """Return the fraction of time for which the cores are busy, as the mean over all cores, 0 to 1; None if unknown."""
    return sum(host.cores) / len(host.cores) if host.cores else None


def used_gpu(devices: Devices) -> Gpu | None:
    """Return the GPU that the engine computes on (that of its first rank if there are several); None if unknown."""
    return next((gpu for gpu in devices.gpus if gpu.index in devices.used_gpus[:1]), None)


def gpu_process_bytes(gpu: Gpu, pid: int) -> int | None:
    """Return the bytes of GPU memory of a process. None if the driver does not report it, or reports another
    pid for the process (as in a container).
    """
    return next((process.used_bytes for process in gpu.processes or () if process.pid == pid), None)


def _gpu_sample(devices: Devices, gpu: Gpu, pid: int) -> DeviceSample:
    free, total = gpu.memory_free_bytes, gpu.memory_total_bytes
    used = total - free if total is not None and free is not None else gpu.memory_used_bytes
    return DeviceSample(
        epoch=devices.epoch,
        time_ns=devices.time_ns,
        memory_total_bytes=_or_unknown(total),
        memory_used_bytes=_or_unknown(used),
        process_bytes=_or_unknown(gpu_process_bytes(gpu, pid)),
        utilization=-1.0 if gpu.utilization is None else gpu.utilization,
        power_watts=-1.0 if gpu.power_watts is None else gpu.power_watts,
        temperature_celsius=-1.0 if gpu.temperature_celsius is None else gpu.temperature_celsius,
    )


def _host_sample(devices: Devices, host: Host, pid: int | None) -> DeviceSample:
    total, available = host.memory_total_bytes, host.memory_available_bytes
    process = next((process for process in host.processes or () if process.pid == pid), None)
    cores = process.cores if process is not None else None
    share = None if cores is None or not host.cores else min(1.0, cores / len(host.cores))
    utilization = busy_share(host) if pid is None else share
    return DeviceSample(
        epoch=devices.epoch,
        time_ns=devices.time_ns,
        memory_total_bytes=_or_unknown(total),
        memory_used_bytes=total - available if total is not None and available is not None else -1,
        process_bytes=_or_unknown(process.resident_bytes if process is not None else None),
        utilization=-1.0 if utilization is None else utilization,
    )


def _or_unknown(value: int | None) -> int:
    return -1 if value is None else value
