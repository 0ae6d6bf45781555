"""Tells the telemetry socket how the devices are, at a rate that is asked for, and with each where the memory went."""

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
    """Devices, as `DevicesSampler` reads them."""

    def sample(self, epoch: int) -> Devices:
        """How they are now."""


class DeviceWatch:
    """Runs from construction to `close`. The engine's own thread never waits for a driver.

    `memory` is None while it is not known; `pid`: the process that has the memory.
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
        """End the thread; one that hangs in a driver is left behind after a second."""
        self._closing.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            devices = self._sampler.sample(self._hello.epoch)
            memory = None
            with contextlib.suppress(Exception):  # a device that fails here is told of by the step
                memory = self._memory()
            self._publish(devices)
            self._publish(device_sample(devices, self._hello, self._pid()))
            if memory is not None:
                self._publish(self._with_context(memory, devices))
            if self._closing.wait(self._sample_s):
                return

    def _with_context(self, memory: MemoryBreakdown, devices: Devices) -> MemoryBreakdown:
        """What the process had beside torch's memory when that was first known: later, more than that is a finding."""
        if self._context_bytes is None:
            gpu = used_gpu(devices)
            process = gpu_process_bytes(gpu, self._pid()) if gpu is not None else None
            if process is None or memory.reserved_bytes < 0:
                return memory
            self._context_bytes = max(0, process - memory.reserved_bytes - max(0, memory.kv_resident_bytes))
        return msgspec.structs.replace(memory, context_bytes=self._context_bytes)
