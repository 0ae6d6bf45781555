"""Measures the memory read bandwidth of a GPU, and reads its clocks."""

from __future__ import annotations

import statistics
from typing import Any, Final

from kvscope_telemetry.devices.gpus import Gpus, bare_uuid

_ROUNDS: Final = 9


def read_gb_per_s(device: str) -> float | None:
    """Measure the bandwidth of a plain read of the device memory in GB/s. Returns None on a CPU."""
    if device == "cpu":
        return None
    from kvscope_engine.bench.kernels.samplers import read_sampler
    from kvscope_engine.bench.measure import interleaved_samples

    sampler, num_bytes = read_sampler(device)
    return num_bytes / statistics.median(interleaved_samples({"read": sampler}, _ROUNDS)["read"]) / 1e9


class GpuClocks:
    """Clocks of the GPU that torch uses. They are unknown on a CPU, and if NVML does not report them."""

    def __init__(self, device: str) -> None:
        self._uuid = "" if device == "cpu" else _uuid()
        self._gpus = Gpus()

    def sample(self) -> dict[str, Any]:
        """Return the SM and memory clocks in MHz, and the reasons for throttling; empty if unknown."""
        if not self._uuid:
            return {}
        for gpu in self._gpus.sample():
            if bare_uuid(gpu.uuid) == self._uuid and gpu.sm_clock_mhz and gpu.memory_clock_mhz:
                return {
                    "sm_clock_mhz": gpu.sm_clock_mhz,
                    "memory_clock_mhz": gpu.memory_clock_mhz,
                    "throttled_by": list(gpu.throttled_by or ()),
                }
        return {}


def _uuid() -> str:
    import torch

    return bare_uuid(str(torch.cuda.get_device_properties(0).uuid))
