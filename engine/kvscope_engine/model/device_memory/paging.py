"""Detects that the driver pages GPU memory to host memory, which it does silently under WSL2. Plain arithmetic.

Two symptoms are used: memory counters that contradict each other, and steps that become slow on a full GPU.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Final

from kvscope_engine.model.device_memory.memory_plan import MIB, gib

SLACK_BYTES: Final = 64 * MIB
"""Bytes by which the counters of driver and allocator may differ."""
FULL_SHARE: Final = 0.02
"""Share of the GPU's total memory. The GPU counts as full if less than this share is free."""
SLOW_FACTOR: Final = 5.0
"""Factor by which a step must exceed the usual time of steps of the same shape to count as slow."""
NUM_SLOW_STEPS: Final = 8
"""Number of consecutive slow steps that indicate paging. A single one may have waited for something else."""
REPORT_INTERVAL_S: Final = 60.0
REMEDY: Final = (
    "set 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback' in the NVIDIA Control Panel of Windows, end"
    " other programs on the GPU, or give a lower --gpu-memory-utilization"
)
NOTE: Final = (
    "this is WSL2: when the GPU's memory is full, the driver may move parts of it to host memory without an error, "
    "and steps then take several times as long; an event reports this when it is detected"
)


def is_wsl(version: Path = Path("/proc/version")) -> bool:
    try:
        return "microsoft" in version.read_text(errors="replace").lower()
    except OSError:
        return False


class PagingWatch:
    """Detects paging. Call `check` between steps and `record_step` after each."""

    def __init__(self) -> None:
        self._usual_ns: dict[Hashable, float] = {}
        self._num_slow = 0
        self._slow_factor = 0.0
        self._reported_s = -REPORT_INTERVAL_S

    def check(self, total: int, free: int, ours: int, now_s: float) -> str:
        """Check memory counters and recent step times.

        Args:
            total: Bytes of the GPU.
            free: Bytes of the GPU that are free.
            ours: Bytes that the driver gave to this process.
            now_s: Current time in seconds.

        Returns:
            A line to report if paging is detected, at most once per `REPORT_INTERVAL_S`; else an empty string.
        """
        paged_bytes = ours - (total - free)
        if paged_bytes > SLACK_BYTES:
            return self._report(f"{gib(paged_bytes)} of this engine's GPU memory are in host memory", now_s)
        if self._num_slow >= NUM_SLOW_STEPS and free <= FULL_SHARE * total:
            symptom = (
                f"steps take {self._slow_factor:.0f} times as long as before, and {gib(free)} of GPU memory are free"
            )
            self._num_slow = 0
            self._usual_ns.clear()  # if steps stay slow, that becomes usual and is reported once
            return self._report(symptom, now_s)
        return ""

    def record_step(self, shape: Hashable, forward_ns: int) -> None:
        """Record a step's time on the device. Steps with the same `shape` usually take about the same time."""
        usual_ns = self._usual_ns.get(shape)
        if usual_ns is not None and forward_ns > SLOW_FACTOR * usual_ns:
            self._num_slow += 1
            self._slow_factor = forward_ns / usual_ns
            return
        self._num_slow = 0
        if forward_ns > 0:
            self._usual_ns[shape] = forward_ns if usual_ns is None else usual_ns + (forward_ns - usual_ns) / 16

    def _report(self, symptom: str, now_s: float) -> str:
        if now_s - self._reported_s < REPORT_INTERVAL_S:
            return ""
        self._reported_s = now_s
        return f"the driver seems to page GPU memory to host memory ({symptom}), which makes steps slow: {REMEDY}"
