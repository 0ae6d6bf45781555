"""Notices that a driver pages GPU memory to host memory, which it does under WSL2 and says to nobody. Plain arithmetic.

Owns how it is recognised, by what is counted and by steps that become slow, and the words for it.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Final

from kvscope_engine.model.device_memory.memory_plan import MIB, gib

SLACK_BYTES: Final = 64 * MIB
"""What counts of driver and allocator may differ by."""
FULL_SHARE: Final = 0.02
"""Of the GPU: with less than that free it is full."""
SLOWER: Final = 5.0
"""Times what a step of its shape took before."""
NUM_SLOW: Final = 8
"""Steps in a row: one that waits for something else is no sign."""
AGAIN_S: Final = 60.0
"""Between two events."""
REMEDY: Final = (
    "set 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback' in the NVIDIA Control Panel of Windows, end"
    " other programs on the GPU, or give a lower --gpu-memory-utilization"
)
NOTE: Final = (
    "this is WSL2, whose driver may page GPU memory to host memory when it is full, without an error: steps then take"
    " several times as long; an event says when that seems to be so"
)


def is_wsl(version: Path = Path("/proc/version")) -> bool:
    """Whether this kernel is Windows' own."""
    try:
        return "microsoft" in version.read_text(errors="replace").lower()
    except OSError:
        return False


class PagingWatch:
    """`look` between steps, `ran` after each. What they return is to be told, at most once a minute; mostly empty."""

    def __init__(self) -> None:
        self._usual_ns: dict[Hashable, float] = {}
        self._num_slow = 0
        self._slower = 0.0
        self._told_s = -AGAIN_S

    def look(self, total: int, free: int, ours: int, now_s: float) -> str:
        """Bytes of the GPU, those that nobody has, and those that this process was given."""
        beyond = ours - (total - free)
        if beyond > SLACK_BYTES:
            return self._tell(f"{gib(beyond)} of what this engine was given are in host memory", now_s)
        if self._num_slow >= NUM_SLOW and free <= FULL_SHARE * total:
            self._num_slow, words = 0, f"steps take {self._slower:.0f} times what they took, and {gib(free)} are free"
            self._usual_ns.clear()  # if it stays so, that is said once
            return self._tell(words, now_s)
        return ""

    def ran(self, shape: Hashable, forward_ns: int) -> None:
        """A step took so long on the device; those of one `shape` take about as long."""
        usual_ns = self._usual_ns.get(shape)
        if usual_ns is not None and forward_ns > SLOWER * usual_ns:
            self._num_slow += 1
            self._slower = forward_ns / usual_ns
            return
        self._num_slow = 0
        if forward_ns > 0:
            self._usual_ns[shape] = forward_ns if usual_ns is None else usual_ns + (forward_ns - usual_ns) / 16

    def _tell(self, words: str, now_s: float) -> str:
        if now_s - self._told_s < AGAIN_S:
            return ""
        self._told_s = now_s
        return f"the driver seems to page GPU memory to host memory ({words}), which makes steps slow: {REMEDY}"
