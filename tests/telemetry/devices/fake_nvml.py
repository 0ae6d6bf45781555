"""A fake NVML: the functions of pynvml with answers and errors that a test sets for each call.

As a script it serves the fake machine to a desktop: `fake_nvml.py ENDPOINT [SECONDS]`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
LOST, NOT_SUPPORTED, UNINITIALIZED = 15, 3, 1
CODES = (*range(1, 28), 999)


class NVMLError(Exception):
    """Stand-in for pynvml's exception, which carries a code."""

    def __init__(self, value: int) -> None:
        super().__init__({LOST: "GPU is lost", NOT_SUPPORTED: "Not Supported"}.get(value, f"NVML error {value}"))
        self.value = value


@dataclass
class FakeGpu:
    """One GPU. `broken` maps a function to the error that it raises for this GPU."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    total: int = 80 * GIB
    reserved: int = 1 * GIB
    used: int = 30 * GIB
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    busy: int = 75
    watts: float = 420.5
    celsius: int = 66
    reasons: int = 0x4
    link_kib: int = 0
    draws: int = 0
    broken: dict[str, Exception] = field(default_factory=dict)


class FakeNvml:
    """The functions of `pynvml` that are used. `broken` maps a function to the error that it raises for every GPU."""

    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED

    def __init__(self, gpus: list[FakeGpu]) -> None:
        self.gpus = gpus
        self.instances: list[FakeGpu] = []
        """Of MIG: not counted, and found by their UUID."""
        self.broken: dict[str, Exception] = {}
        self.num_inits = 0

    def nvmlInit(self) -> None:
        self.num_inits += 1
        self._check("nvmlInit")

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._check("nvmlDeviceGetHandleByIndex", self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        self._check("nvmlDeviceGetHandleByUUID")
        found = next((gpu for gpu in (*self.gpus, *self.instances) if gpu.uuid == uuid), None)
        return found if found is not None else _raise(NVMLError(6))

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        self._check("nvmlSystemGetProcessName")
        return f"/usr/bin/worker{pid}".encode()

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> Any:
        self._check("nvmlDeviceGetMemoryInfo", gpu)
        free = gpu.total - gpu.used - gpu.reserved
        if version is None:
            return SimpleNamespace(total=gpu.total, used=gpu.used + gpu.reserved, free=free)
        self._check("nvmlDeviceGetMemoryInfo_v2", gpu)
        return SimpleNamespace(total=gpu.total, used=gpu.used, reserved=gpu.reserved, free=free)

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[Any]) -> list[Any]:
        self._check("nvmlDeviceGetFieldValues", gpu)
        value = SimpleNamespace(uiVal=gpu.celsius + 8, ullVal=gpu.link_kib)
        return [SimpleNamespace(nvmlReturn=0, value=value) for _ in fields]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: 1980 if kind == 1 else 2619,
            "nvmlDeviceGetClockInfo": lambda gpu, kind: 1755 if kind == 1 else 2619,
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu.busy, memory=gpu.busy // 2),
            "nvmlDeviceGetPowerUsage": lambda gpu: round(gpu.watts * 1000),
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: gpu.celsius,
            "nvmlDeviceGetFanSpeed": lambda gpu: _raise(NVMLError(NOT_SUPPORTED)),
            "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: gpu.reasons,
            "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: (3, 0)[kind],
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: 5,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 16,
            "nvmlDeviceGetPcieThroughput": lambda gpu, counter: (250_000, 1_000_000)[counter],
            "nvmlDeviceGetDisplayActive": lambda gpu: gpu.draws,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in gpu.processes
            ],
            "nvmlDeviceGetGraphicsRunningProcesses": lambda gpu: [],
        }
        if name not in answers:
            raise AttributeError(name)

        def answer(gpu: FakeGpu, *arguments: Any) -> Any:
            self._check(name, gpu)
            return answers[name](gpu, *arguments)

        return answer

    def _check(self, name: str, gpu: FakeGpu | None = None) -> None:
        for broken in (self.broken, gpu.broken if gpu is not None else {}):
            if name in broken:
                raise broken[name]


def _raise(error: Exception) -> Any:
    raise error


def two_gpus() -> FakeNvml:
    """Return a machine with two GPUs, one of them busy."""
    busy = FakeGpu("GPU-aaaa", processes=[(4711, 24 * GIB), (4712, 5 * GIB)], used=30 * GIB)
    idle = FakeGpu(
        "GPU-bbbb", used=1 * GIB, processes=[(4713, None)], busy=2, watts=71.0, celsius=34, reasons=0x1, draws=1
    )
    return FakeNvml([busy, idle])


def animate(nvml: FakeNvml, at_s: float) -> None:
    """Change the load of all GPUs over time, so that curves have something to show."""
    for place, gpu in enumerate(nvml.gpus):
        wave = (1 + math.sin(at_s / (7 + 5 * place))) / 2
        gpu.busy, gpu.celsius = round(5 + 92 * wave), round(38 + 40 * wave)
        gpu.watts, gpu.reasons = 90 + 610 * wave, 0x4 if wave > 0.85 else 0x20 if wave > 0.75 else 0x1 * (wave < 0.1)
        gpu.used = round((22 + 40 * wave) * GIB)
        gpu.processes = [(4711 + 10 * place, round(gpu.used * 0.8)), (4712 + 10 * place, round(gpu.used * 0.17))]
        gpu.link_kib += round(wave * 40e6)


def main() -> None:
    from kvscope_engine.server.device_publisher import DevicePublisher
    from kvscope_telemetry.devices.gpus import Gpus
    from kvscope_telemetry.devices.host_reader import HostReader
    from kvscope_telemetry.devices.sampler import DevicesSampler

    nvml, until_s = two_gpus(), time.monotonic() + float((sys.argv[2:] or ["3600"])[0])
    sampler = DevicesSampler(Gpus(lambda name: nvml), HostReader(None))
    with DevicePublisher(sys.argv[1], sampler=sampler, interval_s=0.5) as publisher:
        print(f"listening on {publisher.telemetry_endpoint}", flush=True)
        while time.monotonic() < until_s:
            animate(nvml, time.monotonic())
            time.sleep(0.25)


if __name__ == "__main__":
    main()
