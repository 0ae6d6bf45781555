"""What the device and this process say of themselves, now. Unknown is -1, never 0, and nothing raises.

Reads /proc on a CPU, and NVML (through `pynvml`, when it is installed) on a GPU. Knows neither the engine
nor torch.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kvscope_telemetry.messages.telemetry import DeviceSample

KIB = 1024
_Value = TypeVar("_Value")


class DeviceReader(Protocol):
    """One kind of device."""

    def sample(self, epoch: int) -> DeviceSample:
        """How it is now."""


def sampler_for(device_kind: str) -> DeviceReader:
    """The sampler of "cuda" or "cpu"."""
    return GpuSampler() if device_kind == "cuda" else CpuSampler()


class CpuSampler:
    """Host memory, resident set, and the share of all CPUs since the sample before."""

    def __init__(self) -> None:
        self._before = (time.monotonic(), time.process_time())

    def sample(self, epoch: int) -> DeviceSample:
        """How host and process are now."""
        total, available = _meminfo("MemTotal"), _meminfo("MemAvailable")
        return DeviceSample(
            epoch=epoch,
            time_ns=time.monotonic_ns(),
            memory_total_bytes=total,
            memory_used_bytes=total - available if total >= 0 and available >= 0 else -1,
            process_bytes=_known(_resident_bytes, -1),
            utilization=self._utilization(),
        )

    def _utilization(self) -> float:
        wall, cpu = time.monotonic(), time.process_time()
        passed, used = wall - self._before[0], cpu - self._before[1]
        self._before = (wall, cpu)
        return min(1.0, used / passed / (os.cpu_count() or 1)) if passed > 0 else -1.0


class GpuSampler:
    """The first visible GPU by NVML. Each number is asked for alone: one that fails spoils no other.

    A GPU that is lost is looked for again at each sample, so that numbers come back when it does.
    """

    def __init__(self, import_module: Callable[[str], Any] = importlib.import_module) -> None:
        self._import_module = import_module
        self._nvml: Any = None
        self._handle: Any = None

    def sample(self, epoch: int) -> DeviceSample:
        """How the GPU is now."""
        if self._handle is None:
            self._handle = _known(self._open, None)
        memory = self._ask("nvmlDeviceGetMemoryInfo", lambda info: info, None)
        sample = DeviceSample(
            epoch=epoch,
            time_ns=time.monotonic_ns(),
            memory_total_bytes=_known(lambda: int(memory.total), -1),
            memory_used_bytes=_known(lambda: int(memory.used), -1),
            process_bytes=self._ask("nvmlDeviceGetComputeRunningProcesses", _own_bytes, -1),
            utilization=self._ask("nvmlDeviceGetUtilizationRates", lambda rates: rates.gpu / 100, -1.0),
            power_watts=self._ask("nvmlDeviceGetPowerUsage", lambda milliwatts: milliwatts / 1000, -1.0),
            temperature_celsius=self._ask("nvmlDeviceGetTemperature", float, -1.0, 0),
        )
        if memory is None:
            self._handle = None
        return sample

    def _open(self) -> Any:
        self._nvml = self._import_module("pynvml")
        self._nvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        if first.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(first))
        return self._nvml.nvmlDeviceGetHandleByUUID(first)

    def _ask(self, name: str, read: Callable[[Any], _Value], unknown: _Value, *arguments: int) -> _Value:
        if self._handle is None:
            return unknown
        return _known(lambda: read(getattr(self._nvml, name)(self._handle, *arguments)), unknown)


def _known(ask: Callable[[], _Value], unknown: _Value) -> _Value:
    """What `ask` says; `unknown` whatever goes wrong: drivers fail in ways no list of exceptions holds."""
    try:
        return ask()
    except Exception:
        return unknown


def _own_bytes(processes: Any) -> int:
    mine = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return int(mine[0]) if mine and mine[0] is not None else -1


def _meminfo(key: str) -> int:
    """A line of /proc/meminfo in bytes, -1 when it cannot be read."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next((int(line.split()[1]) * KIB for line in lines if line.startswith(f"{key}:")), -1)
    except (OSError, ValueError):
        return -1


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
