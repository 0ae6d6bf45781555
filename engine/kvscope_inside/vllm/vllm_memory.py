"""Queries the memory use of vLLM's workers by vLLM's own RPC, once when the engine core begins to serve.

Weights and graphs do not change afterwards. `worker_memory` runs in a worker, possibly in another process; it reads the
model's parameters and torch's allocator on the host, never a device.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvscope_inside.engine_log import engine_log
from kvscope_inside.weights import bytes_by_part
from kvscope_telemetry.messages.telemetry import Hello, MemoryBreakdown, ModuleBytes, RankMemory

REPLY_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory use of one worker. All sizes are in bytes; -1 if unknown."""

    pid: int
    device: str
    weights: int
    parts: dict[str, int] = field(default_factory=dict)
    graphs: int = -1
    activations: int = -1
    reserved: int = -1
    allocated: int = -1
    peak: int = -1


def worker_memory(worker: Any) -> WorkerMemory:
    """Return the memory use of `worker`. Must run in the worker's process."""
    runner = worker.model_runner
    parts = bytes_by_part(runner.model)
    device = str(getattr(worker, "device", "cpu"))
    weights = _weights(worker, sum(parts.values()))
    torch_bytes = _torch_bytes() if device.startswith("cuda") else {}
    return WorkerMemory(
        pid=os.getpid(),
        device=device,
        weights=weights,
        parts=parts if 0.95 * weights <= sum(parts.values()) <= 1.05 * weights else {},
        graphs=int(getattr(worker, "cudagraph_memory_estimate", -1) or 0),
        activations=int(getattr(worker, "peak_activation_memory", -1)),
        **torch_bytes,
    )


def _weights(worker: Any, parameter_bytes: int) -> int:
    """Return the bytes of weights, as measured by vLLM on GPUs.

    On other devices, this is the larger of the parameters and the rank's part of the model's files, because on CPUs
    some layers store packed weights outside of parameters.
    """
    measured = int(getattr(worker.model_runner, "model_memory_usage", 0) or 0)
    if measured:
        return measured
    folder = Path(str(worker.vllm_config.model_config.model))
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0
    parallel = worker.vllm_config.parallel_config
    return max(parameter_bytes, file_bytes // int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size))


def _torch_bytes() -> dict[str, int]:
    import torch

    stats = torch.cuda.memory_stats()
    names = {"reserved": "reserved_bytes", "allocated": "allocated_bytes"}
    num_bytes = {name: int(stats.get(f"{stat}.all.current", -1)) for name, stat in names.items()}
    return num_bytes | {"peak": int(stats.get("allocated_bytes.all.peak", -1))}


class EngineMemory:
    """Memory use reported by the workers of one engine core. `kv_bytes`: size of one worker's KV cache in bytes."""

    def __init__(self, hello: Hello, kv_bytes: int) -> None:
        self._hello, self._kv_bytes = hello, kv_bytes
        self._workers: list[WorkerMemory] = []

    def query(self, engine: Any) -> None:
        """Query all workers. Called on the engine core's thread, before the engine core begins to serve.

        Errors are logged, and the memory remains unknown.
        """
        try:
            self._workers = engine.model_executor.collective_rpc(worker_memory, timeout=REPLY_TIMEOUT_S)
        except Exception as error:
            engine_log("vllm").warning("kvscope: the memory use of the workers is unknown: %s", error)

    @property
    def pid(self) -> int:
        """Process id of the first worker, or of this process while no worker has answered."""
        return self._workers[0].pid if self._workers else os.getpid()

    def breakdown(self) -> MemoryBreakdown | None:
        if not self._workers:
            return None
        first = self._workers[0]
        ranks = tuple(
            RankMemory(rank=rank, device=each.device, weights_bytes=each.weights, kv_bytes=self._kv_bytes)
            for rank, each in enumerate(self._workers)
        )
        return MemoryBreakdown(
            epoch=self._hello.epoch,
            time_ns=time.monotonic_ns(),
            weights_bytes=first.weights,
            kv_bytes=self._kv_bytes,
            graphs_bytes=max(0, first.graphs),
            step_bytes=first.activations,
            modules=tuple(ModuleBytes(name=name, num_bytes=count) for name, count in first.parts.items()),
            allocated_bytes=first.allocated,
            reserved_bytes=first.reserved,
            peak_bytes=first.peak,
            ranks=ranks if len(ranks) > 1 else (),
        )
