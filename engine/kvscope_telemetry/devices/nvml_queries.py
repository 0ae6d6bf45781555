"""Queries one GPU through NVML. Each value is queried separately, so that a failing query affects no other.

Owns the previous values of counters, to compute rates. `gpus` decides which GPUs exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from kvscope_telemetry.devices.optional_values import counted, known, measured
from kvscope_telemetry.devices.throttling import names_of
from kvscope_telemetry.messages.devices import MAX_PROCESSES, Gpu, GpuProcess

_MEMORY_V2: Final = 0x2000028
_TEMPERATURE_OF_GPU: Final = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_PCIE_SENT, _PCIE_RECEIVED = 0, 1
_ECC_CORRECTED, _ECC_UNCORRECTED, _ECC_VOLATILE = 0, 1, 0
_FIELD_MEMORY_TEMPERATURE: Final = 82
_FIELD_NVLINK_SENT, _FIELD_NVLINK_RECEIVED = 138, 139
_ALL_LINKS: Final = 0xFFFFFFFF
_KIB: Final = 1024
_MAX_NAME: Final = 80


class GpuQueries:
    """Queries the GPU with the NVML handle `handle`.

    Only `sample` may raise: it passes on an error of the memory query, which shows that the GPU is no longer present.
    """

    def __init__(self, nvml: Any, handle: Any, index: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._nvml = nvml
        self._handle = handle
        self._clock_ns = clock_ns
        self._nvlink: dict[int, tuple[int, int]] = {}  # field -> time in ns, total KiB
        self._names: dict[int, str] = {}
        self.facts = self._facts(index)

    def sample(self) -> Gpu:
        """Sample the GPU now. Raises NVML's error if querying the memory fails, unless the query is not supported."""
        memory = self._memory()
        return msgspec.structs.replace(
            self.facts,
            memory_total_bytes=counted(lambda: memory.total),
            memory_used_bytes=counted(lambda: memory.used),
            memory_reserved_bytes=counted(lambda: memory.reserved),
            memory_free_bytes=counted(lambda: memory.free),
            processes=self._processes(),
            display_active=known(lambda: bool(self._query("nvmlDeviceGetDisplayActive"))),
            **self._load(),
            **self._power(),
            **self._clocks(),
            **self._health(),
            **self._traffic(),
        )

    def _facts(self, index: int) -> Gpu:
        return Gpu(
            index=index,
            name=_text(known(lambda: self._query("nvmlDeviceGetName"))),
            uuid=_text(known(lambda: self._query("nvmlDeviceGetUUID"))),
            max_sm_clock_mhz=counted(lambda: self._query("nvmlDeviceGetMaxClockInfo", _CLOCK_SM)),
            max_memory_clock_mhz=counted(lambda: self._query("nvmlDeviceGetMaxClockInfo", _CLOCK_MEMORY)),
        )

    def _memory(self) -> Any:
        memory = known(lambda: self._query("nvmlDeviceGetMemoryInfo", _MEMORY_V2))
        if memory is not None:
            return memory
        try:
            return self._query("nvmlDeviceGetMemoryInfo")
        except Exception as error:
            if is_not_supported(self._nvml, error):
                return None  # integrated GPUs have no memory of their own
            raise

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        lists = [known(partial(self._query, name)) for name in _PROCESS_LISTS]
        if all(found is None for found in lists):
            return None
        used = {int(p.pid): counted(partial(getattr, p, "usedGpuMemory")) for found in lists for p in found or ()}
        self._names = {pid: self._names.get(pid) or self._name_of(pid) for pid in used}
        processes = [
            GpuProcess(pid=pid, name=self._names[pid], used_bytes=size) for pid, size in used.items() if pid >= 0
        ]
        return tuple(sorted(processes, key=lambda process: (-(process.used_bytes or 0), process.pid))[:MAX_PROCESSES])

    def _name_of(self, pid: int) -> str:
        """Return the name of a process, from the driver (a path) or `/proc`; empty in a container that can see
        neither.
        """
        name = _text(known(lambda: self._nvml.nvmlSystemGetProcessName(pid)))
        return Path(name).name[:_MAX_NAME] or _text(known(lambda: Path(f"/proc/{pid}/comm").read_text().strip()))

    def _load(self) -> dict[str, Any]:
        rates: Any = known(lambda: self._query("nvmlDeviceGetUtilizationRates"))
        return {
            "utilization": measured(lambda: rates.gpu / 100),
            "memory_utilization": measured(lambda: rates.memory / 100),
        }

    def _power(self) -> dict[str, Any]:
        return {
            "power_watts": measured(lambda: self._query("nvmlDeviceGetPowerUsage") / 1000),
            "power_limit_watts": measured(lambda: self._query("nvmlDeviceGetEnforcedPowerLimit") / 1000),
            "temperature_celsius": measured(lambda: self._query("nvmlDeviceGetTemperature", _TEMPERATURE_OF_GPU)),
            "memory_temperature_celsius": measured(lambda: self._field(_FIELD_MEMORY_TEMPERATURE).uiVal) or None,
            "fan": measured(lambda: self._query("nvmlDeviceGetFanSpeed") / 100),
        }

    def _clocks(self) -> dict[str, Any]:
        bits = counted(lambda: self._query("nvmlDeviceGetCurrentClocksEventReasons"))
        if bits is None:  # the name in older drivers
            bits = counted(lambda: self._query("nvmlDeviceGetCurrentClocksThrottleReasons"))
        return {
            "sm_clock_mhz": counted(lambda: self._query("nvmlDeviceGetClockInfo", _CLOCK_SM)),
            "memory_clock_mhz": counted(lambda: self._query("nvmlDeviceGetClockInfo", _CLOCK_MEMORY)),
            "throttled_by": names_of(bits) if bits is not None else None,
        }

    def _health(self) -> dict[str, Any]:
        def errors(kind: int) -> int | None:
            return counted(lambda: self._query("nvmlDeviceGetTotalEccErrors", kind, _ECC_VOLATILE))

        return {"ecc_corrected": errors(_ECC_CORRECTED), "ecc_uncorrected": errors(_ECC_UNCORRECTED)}

    def _traffic(self) -> dict[str, Any]:
        def pcie(counter: int) -> int | None:
            return counted(lambda: self._query("nvmlDeviceGetPcieThroughput", counter) * _KIB)

        return {
            "pcie_generation": counted(lambda: self._query("nvmlDeviceGetCurrPcieLinkGeneration")),
            "pcie_width": counted(lambda: self._query("nvmlDeviceGetCurrPcieLinkWidth")),
            "pcie_sent_bytes_s": pcie(_PCIE_SENT),
            "pcie_received_bytes_s": pcie(_PCIE_RECEIVED),
            "nvlink_sent_bytes_s": self._nvlink_rate(_FIELD_NVLINK_SENT),
            "nvlink_received_bytes_s": self._nvlink_rate(_FIELD_NVLINK_RECEIVED),
        }

    def _nvlink_rate(self, field: int) -> int | None:
        """Return the NVLink throughput of a counter in bytes per second; None in the first sample and after the
        counter was reset.
        """
        total = counted(lambda: self._field((field, _ALL_LINKS)).ullVal)
        if total is None:
            self._nvlink.pop(field, None)
            return None
        now_ns = self._clock_ns()
        before_ns, before = self._nvlink.get(field, (now_ns, total))
        self._nvlink[field] = now_ns, total
        if now_ns <= before_ns or total < before:
            return None
        return (total - before) * _KIB * 1_000_000_000 // (now_ns - before_ns)

    def _field(self, field: int | tuple[int, int]) -> Any:
        value = self._nvml.nvmlDeviceGetFieldValues(self._handle, [field])[0]
        if value.nvmlReturn != 0:
            raise LookupError(f"field {field} is not reported")
        return value.value

    def _query(self, name: str, *arguments: int) -> Any:
        return getattr(self._nvml, name)(self._handle, *arguments)


_PROCESS_LISTS: Final = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")


def is_not_supported(nvml: Any, error: Exception) -> bool:
    """Return whether `error` says that this GPU lacks a feature, which is no fault."""
    return getattr(error, "value", None) == getattr(nvml, "NVML_ERROR_NOT_SUPPORTED", 3)


def fault_text(error: BaseException | Iterable[object]) -> str:
    return " ".join(f"{error}".split())[:160] or type(error).__name__


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value[:_MAX_NAME] if isinstance(value, str) else ""
