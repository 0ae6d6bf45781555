"""Samples GPUs and host into one message."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvscope_telemetry.devices.gpus import Gpus, bare_uuid
from kvscope_telemetry.devices.host_reader import HostReader, own_process
from kvscope_telemetry.messages.devices import Devices


class DevicesSampler:
    """Samples all devices. Never raises. Used by one thread, which may wait for a driver.

    `used`: UUIDs of the GPUs that the caller computes on (`DeviceInfo.uuids`). Indices would not match: NVML orders
    GPUs by PCI bus, CUDA by speed and only among those in `CUDA_VISIBLE_DEVICES`.
    """

    def __init__(
        self,
        gpus: Gpus | None = None,
        host: HostReader | None = None,
        *,
        used: Sequence[str] = (),
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._gpus = gpus or Gpus(used=used, clock_ns=clock_ns)
        self._host = host or HostReader(own_process(), clock_ns=clock_ns)
        self._used = [bare_uuid(uuid) for uuid in used]
        self._clock_ns = clock_ns

    def sample(self, epoch: int) -> Devices:
        gpus = self._gpus.sample()
        index_of = {bare_uuid(gpu.uuid): gpu.index for gpu in gpus}
        return Devices(
            epoch=epoch,
            time_ns=self._clock_ns(),
            gpus=gpus,
            host=self._host.sample(),
            fault=self._gpus.fault,
            used_gpus=tuple(index_of[uuid] for uuid in self._used if uuid in index_of),
        )
