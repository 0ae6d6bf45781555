"""Tells the telemetry socket once a second how the device is, and every few seconds where the memory went."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final

from kvscope_engine.server.device_reader import DeviceReader, sampler_for
from kvscope_engine.server.served_engine import Publish
from kvscope_telemetry.messages.telemetry import Hello, MemoryBreakdown

SAMPLE_S: Final = 1.0
SAMPLES_A_BREAKDOWN: Final = 5


class DeviceWatch:
    """Runs from construction to `close`. The engine's own thread never waits for a driver."""

    def __init__(
        self,
        hello: Hello,
        memory: Callable[[], MemoryBreakdown],
        publish: Publish,
        *,
        sampler: DeviceReader | None = None,
        sample_s: float = SAMPLE_S,
    ) -> None:
        self._epoch = hello.epoch
        self._memory = memory
        self._publish = publish
        self._sampler = sampler or sampler_for(hello.device.kind)
        self._sample_s = sample_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-sampling", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that hangs in a driver is left behind after a second."""
        self._closing.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        count = 0
        while True:
            self._publish(self._sampler.sample(self._epoch))
            if count % SAMPLES_A_BREAKDOWN == 0:
                with contextlib.suppress(Exception):  # a device that fails here is told of by the step
                    self._publish(self._memory())
            count += 1
            if self._closing.wait(self._sample_s):
                return
