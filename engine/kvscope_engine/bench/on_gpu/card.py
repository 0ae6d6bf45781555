"""What a GPU's memory can do, by its data sheet and as a plain read measures it, and the clocks it runs at."""

from __future__ import annotations

from typing import Any, Final

from kvscope_telemetry.devices.gpus import Gpus, bare_uuid

READ_BYTES: Final = 1 << 30
DATA_SHEET_GB_PER_S: Final = {
    "NVIDIA A10": 600,
    "NVIDIA A10G": 600,
    "NVIDIA A40": 696,
    "NVIDIA A100-PCIE-40GB": 1555,
    "NVIDIA A100-SXM4-40GB": 1555,
    "NVIDIA A100 80GB PCIe": 1935,
    "NVIDIA A100-SXM4-80GB": 2039,
    "NVIDIA B200": 8000,
    "NVIDIA GeForce RTX 3090": 936,
    "NVIDIA GeForce RTX 3090 Ti": 1008,
    "NVIDIA GeForce RTX 4080": 717,
    "NVIDIA GeForce RTX 4090": 1008,
    "NVIDIA GeForce RTX 5080": 960,
    "NVIDIA GeForce RTX 5090": 1792,
    "NVIDIA H100 80GB HBM3": 3350,
    "NVIDIA H100 NVL": 3938,
    "NVIDIA H100 PCIe": 2039,
    "NVIDIA H200": 4800,
    "NVIDIA L4": 300,
    "NVIDIA L40S": 864,
    "NVIDIA RTX 6000 Ada Generation": 960,
    "NVIDIA RTX A6000": 768,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 1792,
}
"""By the name that the driver gives, whole: a part of one (MIG) has another name, and less."""


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
