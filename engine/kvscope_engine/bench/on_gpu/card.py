"""What a GPU's memory can do as a plain read measures it, and the clocks it runs at."""

from __future__ import annotations

from typing import Any, Final

from kvscope_telemetry.devices.gpus import Gpus, bare_uuid

READ_BYTES: Final = 1 << 30


def read_gb_per_s(device: str) -> float | None:
    """Bytes a nanosecond that a plain read of the memory reaches now; None on a CPU."""
    import torch

    if device == "cpu":
        return None
    from kvscope_kernels.benchmark.stream_read import stream_read, sums_for
    from kvscope_kernels.benchmark.timing import time_on_gpu

    data = torch.ones(READ_BYTES // 4, dtype=torch.int32, device=device)
    sums = sums_for(data)
    seconds = time_on_gpu({"read": [lambda: stream_read(data, sums)]})["read"]
    return float(READ_BYTES / seconds / 1e9)


class Clocks:
    """Of the GPU that torch computes on. Unknown on a CPU and where NVML does not tell."""

    def __init__(self, device: str) -> None:
        self._uuid = "" if device == "cpu" else _uuid()
        self._gpus = Gpus()

    def now(self) -> dict[str, Any]:
        """MHz of the multiprocessors and of the memory, and what holds them back."""
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
