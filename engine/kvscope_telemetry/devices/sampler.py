"""GPUs and host in one message, each time it is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from kvscope_telemetry.devices.gpus import Gpus
from kvscope_telemetry.devices.host import HostReader, own_process
from kvscope_telemetry.messages.devices import Devices, Gpu


class DevicesSampler:
    """Never raises; used by one thread, which may wait for a driver.

    `uses_gpu`: whether who samples computes on a GPU, the first that it can see.
    """

    def __init__(
        self,
        gpus: Gpus | None = None,
        host: HostReader | None = None,
        *,
        uses_gpu: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._gpus = gpus or Gpus(clock_ns=clock_ns)
        self._host = host or HostReader(own_process(), clock_ns=clock_ns)
        self._uses_gpu = uses_gpu
        self._clock_ns = clock_ns

    def sample(self, epoch: int) -> Devices:
        """How all of it is now."""
        gpus = self._gpus.sample()
        return Devices(
            epoch=epoch,
            time_ns=self._clock_ns(),
            gpus=gpus,
            host=self._host.sample(),
            fault=self._gpus.fault,
            used_gpus=first_visible(gpus) if self._uses_gpu else (),
        )


def first_visible(gpus: tuple[Gpu, ...], visible: str | None = None) -> tuple[int, ...]:
    """Index of the first of `CUDA_VISIBLE_DEVICES`, which names GPUs by number or by who they are; empty: not there."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if visible is None else visible
    first = visible.split(",")[0].strip() or "0"
    found = (gpu.index for gpu in gpus if f"{gpu.index}" == first or (gpu.uuid and gpu.uuid.startswith(first)))
    return tuple(found)[:1]
