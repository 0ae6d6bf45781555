"""Samples of all GPUs and the host: the newest one complete, earlier ones as numeric columns for charts. Imports no Qt.

Retains the newest hour at one sample per second. Times are on this machine's monotonic clock, like those of `History`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.devices.device_reader import busy_share
from kvscope_telemetry.messages.devices import Devices, Gpu, Host

FloatArray = npt.NDArray[np.float64]

MAX_SAMPLES: Final = 3600
HOST: Final = "host"
COLUMNS: Final = (
    "utilization",
    "memory_utilization",
    "memory_used_bytes",
    "power_watts",
    "temperature_celsius",
    "sm_clock_mhz",
    "pcie_bytes_s",
    "nvlink_bytes_s",
    "swap_used_bytes",
)
"""Recorded quantities of a GPU, and of the host where they apply. Traffic is the sum of both directions."""


class DeviceLog:
    """Log of device samples, which must be appended in the order of their times.

    Call `clear` before a sample that does not continue the series.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.newest: Devices | None = None
        self.version = 0
        self._rings: dict[str, _Ring] = {}

    def append(self, devices: Devices, at_ns: int) -> None:
        self.newest = devices
        self.version += 1
        for gpu in devices.gpus:
            self._ring(gpu_key(gpu)).append(at_ns, [_gpu_value(gpu, name) for name in COLUMNS])
        if devices.host is not None:
            self._ring(HOST).append(at_ns, [_host_value(devices.host, name) for name in COLUMNS])

    def curve(self, key: str, name: str) -> tuple[FloatArray, FloatArray]:
        """Return the times in seconds and the values of column `name` in `COLUMNS`, shape (n,) each, NaN where unknown.

        `key` is `HOST` or a result of `gpu_key`.
        """
        ring = self._rings.get(key)
        if ring is None:
            return np.empty(0), np.empty(0)
        rows = ring.rows()
        return rows[:, 0] / 1e9, rows[:, 1 + COLUMNS.index(name)]

    @property
    def begin_s(self) -> float | None:
        """Time of the oldest retained sample in seconds; None without samples."""
        begins = [float(rows[0, 0]) / 1e9 for ring in self._rings.values() if len(rows := ring.rows())]
        return min(begins, default=None)

    def _ring(self, key: str) -> _Ring:
        return self._rings.setdefault(key, _Ring())


class _Ring:
    """Newest `MAX_SAMPLES` rows of (time in ns, *`COLUMNS`).

    Rows are appended to an array that is compacted when it is full, so that `rows` is a contiguous view.
    """

    def __init__(self) -> None:
        self._rows: FloatArray = np.empty((64, 1 + len(COLUMNS)))
        self._num_rows = 0

    def append(self, at_ns: int, values: list[float]) -> None:
        if self._num_rows and at_ns <= self._rows[self._num_rows - 1, 0]:
            return
        if self._num_rows == len(self._rows):
            retained = self._rows[-MAX_SAMPLES:] if self._num_rows >= 2 * MAX_SAMPLES else self._rows
            self._rows = np.concatenate([retained, np.empty_like(retained)])
            self._num_rows = len(retained)
        self._rows[self._num_rows] = (at_ns, *values)
        self._num_rows += 1

    def rows(self) -> FloatArray:
        return self._rows[max(0, self._num_rows - MAX_SAMPLES) : self._num_rows]


def gpu_key(gpu: Gpu) -> str:
    """Return a key that identifies the GPU across samples, also while the GPU is lost."""
    return gpu.uuid or f"GPU {gpu.index}"


def used_bytes(gpu: Gpu) -> int | None:
    """Return the GPU memory that is used by processes or reserved by the driver; None if unknown."""
    if gpu.memory_total_bytes is not None and gpu.memory_free_bytes is not None:
        return gpu.memory_total_bytes - gpu.memory_free_bytes
    return gpu.memory_used_bytes


def host_used_bytes(host: Host) -> int | None:
    """Return the host memory that processes cannot allocate without swapping; None if unknown."""
    if host.memory_total_bytes is None or host.memory_available_bytes is None:
        return None
    return host.memory_total_bytes - host.memory_available_bytes


def _gpu_value(gpu: Gpu, name: str) -> float:
    if name == "memory_used_bytes":
        return _number(used_bytes(gpu))
    if name == "pcie_bytes_s":
        return _sum(gpu.pcie_sent_bytes_s, gpu.pcie_received_bytes_s)
    if name == "nvlink_bytes_s":
        return _sum(gpu.nvlink_sent_bytes_s, gpu.nvlink_received_bytes_s)
    return _number(getattr(gpu, name, None))


def _host_value(host: Host, name: str) -> float:
    if name == "utilization":
        return _number(busy_share(host))
    return _number(host_used_bytes(host) if name == "memory_used_bytes" else getattr(host, name, None))


def _sum(*parts: int | None) -> float:
    return np.nan if any(part is None for part in parts) else float(sum(part or 0 for part in parts))


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)
