"""What torch's allocator says of a GPU's memory: in tensors, cached for the next ones, and left over of blocks in use.

Owns the names of its statistics. A CPU's allocator tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class AllocatorUse:
    """Bytes; -1 where it does not tell."""

    allocated: int = -1
    reserved: int = -1
    split: int = -1
    peak: int = -1


def allocator_use(
    device: torch.device, statistics: Callable[[torch.device], Mapping[str, Any]] = torch.cuda.memory_stats
) -> AllocatorUse:
    """How it stands on `device` now."""
    if device.type != "cuda":
        return AllocatorUse()
    told = statistics(device)
    return AllocatorUse(
        allocated=int(told.get("allocated_bytes.all.current", -1)),
        reserved=int(told.get("reserved_bytes.all.current", -1)),
        split=int(told.get("inactive_split_bytes.all.current", -1)),
        peak=int(told.get("allocated_bytes.all.peak", -1)),
    )
