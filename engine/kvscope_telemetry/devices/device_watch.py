"""Publishes device samples with the memory breakdown at a fixed interval."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from kvscope_telemetry.devices.device_reader import device_sample, gpu_process_bytes, used_gpu
from kvscope_telemetry.devices.sampler import DevicesSampler
from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import Hello, MemoryBreakdown, TelemetryMessage

SAMPLE_S: Final = 1.0
SHORTEST_SAMPLE_S: Final = 0.1
LONGEST_SAMPLE_S: Final = 60.0


class SampledDevices(Protocol):
    def sample(self, epoch: int) -> Devices: ...


class DeviceWatch:
    """Samples devices on a separate thread, from construction to `close`, so that the engine's thread never waits for a
    driver.

    `memory` returns the memory breakdown, or None while it is unknown. `pid` returns the process that owns the memory.
    """

    def __init__(
        self,
        hello: Hello,
        memory: Callable[[], MemoryBreakdown | None],
        publish: Callable[[TelemetryMessage], object],
        *,
        sampler: SampledDevices | None = None,
        sample_s: float = SAMPLE_S,
        pid: Callable[[], int] = os.getpid,
    ) -> None:
        self._hello = hello
        self._pid = pid
        self._memory = memory
        self._publish = publish
        self._sampler = sampler or DevicesSampler(used=hello.device.uuids)
        self._sample_s = sample_s
        self._context_bytes: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-sampling", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. A thread that is blocked in a driver is abandoned after a second."""
        self._closing.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            devices = self._sampler.sample(self._hello.epoch)
            memory = None
            with contextlib.suppress(Exception):  # the engine's step reports a device that fails here
                memory = self._memory()
            self._publish(devices)
            self._publish(device_sample(devices, self._hello, self._pid()))
            if memory is not None:
                self._publish(self._with_context(memory, devices))
            if self._closing.wait(self._sample_s):
                return

    def _with_context(self, memory: MemoryBreakdown, devices: Devices) -> MemoryBreakdown:
        """Return `memory` with `context_bytes` set to the process's GPU memory outside torch, as measured when
        it was first known. Memory that is allocated later outside torch can then be seen as the difference from
        `context_bytes`.
        """
        if self._context_bytes is None:
            gpu = used_gpu(devices)
            process = gpu_process_bytes(gpu, self._pid()) if gpu is not None else None
            if process is None or memory.reserved_bytes < 0:
                return memory
            self._context_bytes = max(0, process - memory.reserved_bytes - max(0, memory.kv_resident_bytes))
        return msgspec.structs.replace(memory, context_bytes=self._context_bytes)
