"""Reads torch's CUDA caching allocator: how much memory is in use, and a map of its segments and blocks.

Defines the names of the allocator's statistics and snapshot fields. On a CPU, there are no statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import AllocatorMap
from kvscope_telemetry.mirror.allocator_map import AllocatorPool, State, TorchSegment, pack_map

_STATES: Final = {"active_allocated": State.ALLOCATED, "inactive": State.CACHED}
"""Block states by name in torch's snapshot. Blocks in any other state wait for a stream; the name of that state differs
between torch versions.
"""
_SHARED_POOL: Final = (0, 0)


@dataclass(frozen=True, slots=True)
class AllocatorUse:
    """Memory of torch's allocator in bytes; -1 for values that it does not report."""

    allocated: int = -1
    reserved: int = -1
    split: int = -1
    peak: int = -1


def allocator_use(
    device: torch.device, statistics: Callable[[torch.device], Mapping[str, Any]] = torch.cuda.memory_stats
) -> AllocatorUse:
    if device.type != "cuda":
        return AllocatorUse()
    stats = statistics(device)
    return AllocatorUse(
        allocated=int(stats.get("allocated_bytes.all.current", -1)),
        reserved=int(stats.get("reserved_bytes.all.current", -1)),
        split=int(stats.get("inactive_split_bytes.all.current", -1)),
        peak=int(stats.get("allocated_bytes.all.peak", -1)),
    )


def allocator_map(
    device: torch.device,
    tag: int,
    snapshot: Callable[[], Sequence[Mapping[str, Any]]] = lambda: _snapshot(),
) -> AllocatorMap:
    """Return the segments and blocks into which the allocator divides the memory of `device`. Raises BadInput for a
    CPU.
    """
    if device.type != "cuda":
        raise BadInput(f"the engine runs on {device.type!r}: PyTorch segments exist only on a GPU (--device cuda)")
    start_ns = time.monotonic_ns()
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [_segment(segment_info) for segment_info in snapshot() if segment_info["device"] == index]
    packed = partial(pack_map, segments, tag=tag, device=f"cuda:{index}")
    return packed(took_ns=time.monotonic_ns() - start_ns)


def _snapshot() -> Sequence[Mapping[str, Any]]:
    segment_info: Sequence[Mapping[str, Any]] = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
    return segment_info


def _segment(segment_info: Mapping[str, Any]) -> TorchSegment:
    address, blocks = int(segment_info["address"]), segment_info["blocks"]
    sizes = np.array([block["size"] for block in blocks], np.int64)
    return TorchSegment(
        address=address,
        num_bytes=int(segment_info["total_size"]),
        stream=int(segment_info["stream"]),
        pool=_pool(segment_info),
        offsets=np.array([block["address"] - address for block in blocks], np.int64),
        sizes=sizes,
        states=np.array([_STATES.get(block["state"], State.PENDING) for block in blocks], np.uint8),
    )


def _pool(segment_info: Mapping[str, Any]) -> AllocatorPool:
    if tuple(segment_info.get("segment_pool_id", _SHARED_POOL)) != _SHARED_POOL:
        return AllocatorPool.PRIVATE
    return AllocatorPool.SMALL if segment_info["segment_type"] == "small" else AllocatorPool.LARGE
