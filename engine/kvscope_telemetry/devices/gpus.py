"""Samples every GPU that NVML reports, including those that responded before and no longer do.

Owns NVML's initialization and the handles. Nothing raises: a driver that is missing, fails or returns, and a GPU that
falls off the bus, are reported in the sample.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvscope_telemetry.devices.nvml_queries import GpuQueries, fault_text
from kvscope_telemetry.messages.devices import MAX_GPUS, Gpu

_GPU, _MIG = "GPU-", "MIG-"
RETRY_NS: Final = 5_000_000_000
"""Minimum interval in ns between attempts to load a missing driver, because an attempt is expensive."""


class Gpus:
    """Samples GPUs through NVML, using `pynvml` unless a test passes another import function.

    `used`: UUIDs of GPUs in use for computing. NVML's device count does not include MIG instances; those in use are
    listed after the GPUs.
    """

    def __init__(
        self,
        import_module: Callable[[str], Any] = importlib.import_module,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        *,
        used: Sequence[str] = (),
    ) -> None:
        self._used = [bare_uuid(uuid) for uuid in used]
        self._import_module = import_module
        self._clock_ns = clock_ns
        self._nvml: Any = None
        self._tried_ns: int | None = None
        self._queries: dict[int, GpuQueries] = {}
        self._seen: dict[str, Gpu] = {}
        self.fault = ""
        """Reason why NVML reports nothing at all; empty if it works."""

    def sample(self) -> tuple[Gpu, ...]:
        """Sample every GPU, in the driver's order."""
        if self._nvml is None and not self._open():
            return tuple(_failed_gpu(facts, self.fault) for facts in self._in_order())
        try:
            count = min(int(self._nvml.nvmlDeviceGetCount()), MAX_GPUS)
        except Exception as error:
            self._disable(error)
            return tuple(_failed_gpu(facts, self.fault) for facts in self._in_order())
        self.fault = ""
        present = [self._sample(index) for index in range(count)]
        present += self._sample_instances(count)
        present_keys = {_key(gpu) for gpu in present}
        missing = [_failed_gpu(facts, "fell off the bus: the driver no longer knows it") for facts in self._in_order()]
        return tuple(
            sorted([*present, *(gpu for gpu in missing if _key(gpu) not in present_keys)], key=lambda gpu: gpu.index)
        )

    def _sample(self, index: int) -> Gpu:
        try:
            queries = self._queries.get(index)
            if queries is None:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                queries = GpuQueries(self._nvml, handle, index, self._clock_ns)
            gpu = queries.sample()
        except Exception as error:
            self._queries.pop(index, None)
            facts = next((facts for facts in self._seen.values() if facts.index == index), Gpu(index=index))
            return _failed_gpu(facts, fault_text(error))
        self._queries[index] = queries
        self._seen[_key(gpu)] = queries.facts
        return gpu

    def _sample_instances(self, count: int) -> list[Gpu]:
        """Sample the MIG instances in use, numbered from `count`. UUIDs in `used` of whole GPUs, including GPUs
        that disappeared, are skipped.
        """
        gpus = {bare_uuid(facts.uuid) for facts in self._seen.values()}
        instances: list[Gpu] = []
        for uuid in self._used:
            if uuid in gpus:
                continue
            with contextlib.suppress(Exception):  # an instance that does not respond is unknown, like any figure
                handle = self._nvml.nvmlDeviceGetHandleByUUID(f"{_MIG}{uuid}")
                instances.append(GpuQueries(self._nvml, handle, count + len(instances), self._clock_ns).sample())
        return instances

    def _open(self) -> bool:
        now_ns = self._clock_ns()
        if self._tried_ns is not None and now_ns - self._tried_ns < RETRY_NS:
            return False
        self._tried_ns = now_ns
        try:
            nvml = self._import_module("pynvml")
            nvml.nvmlInit()
        except Exception as error:
            self.fault = fault_text(error)
            return False
        self._nvml = nvml
        return True

    def _disable(self, error: Exception) -> None:
        self.fault = fault_text(error)
        self._nvml, self._queries, self._tried_ns = None, {}, self._clock_ns()

    def _in_order(self) -> list[Gpu]:
        return sorted(self._seen.values(), key=lambda facts: facts.index)


def bare_uuid(uuid: str) -> str:
    """Return a UUID without its type prefix (`GPU-` or `MIG-`). NVML reports UUIDs with it, CUDA without it."""
    return uuid.removeprefix(_GPU).removeprefix(_MIG)


def _key(gpu: Gpu) -> str:
    return gpu.uuid or f"{gpu.index}"


def _failed_gpu(facts: Gpu, fault: str) -> Gpu:
    return msgspec.structs.replace(facts, fault=fault)
