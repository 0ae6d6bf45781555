"""Measures the memory of SGLang's scheduler process, which also runs the model: weights by part, pools, and torch's
allocator.

Reads the allocator's statistics on the host, never a device. Weights and pools are measured once.
"""

from __future__ import annotations

import time
from typing import Any

from kvscope_inside.engine_log import engine_log
from kvscope_inside.sglang.pools import pools_of
from kvscope_inside.sglang.sglang_facts import kv_bytes
from kvscope_inside.weights import bytes_by_part
from kvscope_telemetry.messages.telemetry import Hello, MemoryBreakdown, ModuleBytes

GIB = 1 << 30


class SchedulerMemory:
    """Memory use of one scheduler process. Weights, pools and graphs are measured on construction."""

    def __init__(self, scheduler: Any, hello: Hello) -> None:
        self._hello = hello
        self._kv_bytes = kv_bytes(pools_of(scheduler))
        self._device = str(scheduler.device)
        self._index = 0
        self._parts: dict[str, int] = {}
        self._weights, self._graphs = 0, -1
        try:
            runner = scheduler.tp_worker.model_runner
            self._index = int(getattr(runner, "gpu_id", 0) or 0)
            self._parts = bytes_by_part(runner.model)
            self._weights = sum(self._parts.values())
            self._graphs = _graph_bytes(runner)
        except Exception as error:
            engine_log("sglang").warning("kvscope: the memory use is unknown: %s", error)

    def breakdown(self) -> MemoryBreakdown | None:
        """Return the current memory use; None if unknown. Thread-safe."""
        if not self._weights:
            return None
        stats = _torch_stats(self._device, self._index)
        return MemoryBreakdown(
            epoch=self._hello.epoch,
            time_ns=time.monotonic_ns(),
            weights_bytes=self._weights,
            kv_bytes=self._kv_bytes,
            graphs_bytes=self._graphs,
            modules=tuple(ModuleBytes(name=name, num_bytes=count) for name, count in self._parts.items()),
            allocated_bytes=stats.get("allocated_bytes.all.current", -1),
            reserved_bytes=stats.get("reserved_bytes.all.current", -1),
            split_bytes=stats.get("inactive_split_bytes.all.current", -1),
            peak_bytes=stats.get("allocated_bytes.all.peak", -1),
        )


def _graph_bytes(runner: Any) -> int:
    """Return the bytes of CUDA graphs as measured by SGLang; -1 if it has not measured them."""
    measured = getattr(runner, "graph_memory_usage", None)
    return int(sum(measured.values()) * GIB) if measured is not None else -1


def _torch_stats(device: str, index: int) -> dict[str, int]:
    """Return statistics of torch's allocator; empty on a CPU.

    `index`: index of SGLang's device, which is not the current device of this thread.
    """
    if not device.startswith("cuda"):
        return {}
    import torch

    return dict(torch.cuda.memory_stats(index))
