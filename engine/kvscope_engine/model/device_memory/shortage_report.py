"""Explains in one line why memory ran out, and which option would have prevented it. Plain arithmetic.

Causes are compared in bytes: memory that other programs took since the start, memory that the allocator holds in
fragments, and a step that took more than was reserved for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscope_engine.model.device_memory.memory_plan import gib
from kvscope_telemetry.messages.telemetry import MemoryBreakdown

_SIGNIFICANT_SHARE: Final = 0.02
"""Minimum share of the device's memory that an amount must have to explain a shortage."""
_MIN_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Memory use when memory ran out, in bytes; -1 for unknown values."""

    memory: MemoryBreakdown
    total: int = -1
    free: int = -1
    others_planned: int = -1
    """Bytes that other programs held when the engine started."""
    num_tokens: int = 0
    num_requests: int = 0
    utilization: float = 0.0
    """Value of --gpu-memory-utilization; 0 on a CPU."""
    grown_holders: str = ""
    """Description of the processes that took memory since the start; empty if unknown."""


def shortage_report(shortage: Shortage) -> str:
    """Describe how the memory is used, the likeliest cause, and the option that avoids it."""
    return f"{_holders(shortage)}: {_remedy(shortage)}"


def start_remedy(holders: str = "", *, on_gpu: bool) -> str:
    """Return a remedy for a model that could not even be loaded. `holders` describes other processes on the GPU."""
    smaller = "a smaller model, or --dtype bfloat16 where it is float32"
    holder_text = f" ({holders})" if holders else ""
    return (
        f"end other programs on the GPU{holder_text}, or give {smaller}"
        if on_gpu
        else f"free some memory, or give {smaller}"
    )


def _holders(shortage: Shortage) -> str:
    memory = shortage.memory
    cached = memory.reserved_bytes - memory.allocated_bytes if memory.reserved_bytes >= 0 else 0
    amounts = {
        "weights": memory.weights_bytes,
        "KV cache": memory.kv_bytes,
        "cached by PyTorch": cached,
        "other programs and contexts": _others(shortage),
        "free": shortage.free,
    }
    sizes = ", ".join(f"{name} {gib(size)}" for name, size in amounts.items() if size > 0)
    return f"of {gib(shortage.total)} there are {sizes}" if shortage.total > 0 else sizes


def _remedy(shortage: Shortage) -> str:
    if shortage.utilization <= 0:
        return f"give a smaller --kv-memory, or {_smaller_step(shortage)}"
    significant = _SIGNIFICANT_SHARE * max(shortage.total, 1)
    grown = _others(shortage) - shortage.others_planned if shortage.others_planned >= 0 else 0
    split = max(0, shortage.memory.split_bytes)
    if grown > max(significant, split):
        share = max(0.05, shortage.utilization - grown / shortage.total)
        holders_text = f" ({shortage.grown_holders})" if shortage.grown_holders else ""
        return (
            f"other programs took {gib(grown)} since the start{holders_text}: end them, or give"
            f" --gpu-memory-utilization {int(100 * share) / 100:.2f}"
        )
    if split > significant:
        return (
            f"{gib(split)} of what torch holds are rests of blocks in use: set"
            f" PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or {_smaller_step(shortage)}"
        )
    lower = int(100 * max(0.05, shortage.utilization - 0.05)) / 100
    return f"give {_smaller_step(shortage)}, or --gpu-memory-utilization {lower:.2f}"


def _smaller_step(shortage: Shortage) -> str:
    """Return the option that makes a step smaller: fewer tokens if it has prefills, else fewer requests."""
    if shortage.num_tokens > shortage.num_requests:
        return f"--max-num-batched-tokens {max(_MIN_TOKENS, shortage.num_tokens // 2)}"
    return f"--max-num-seqs {max(1, shortage.num_requests // 2)}"


def _others(shortage: Shortage) -> int:
    if shortage.total < 0 or shortage.free < 0 or shortage.memory.reserved_bytes < 0:
        return 0
    pages = max(0, shortage.memory.kv_resident_bytes)
    return max(0, shortage.total - shortage.free - shortage.memory.reserved_bytes - pages)
