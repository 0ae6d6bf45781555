"""Figures of a GPU and of the host as text. Unknown values are shown as unknown, never as 0. Imports no Qt."""

from __future__ import annotations

from dataclasses import dataclass

from kvscope_app.session.device_log import host_used_bytes, used_bytes
from kvscope_app.ui.number_text import NOTHING, UNKNOWN, count, num_bytes, percent, plural
from kvscope_telemetry.devices.device_reader import busy_share
from kvscope_telemetry.devices.throttling import is_slowed, reasons_text
from kvscope_telemetry.messages.devices import Devices, Gpu, Host


@dataclass(frozen=True, slots=True)
class DeviceFigure:
    """Name, formatted value and explanation of a figure. `is_bad` says whether the value needs attention."""

    name: str
    value: str
    meaning: str = ""
    is_bad: bool = False


def gpu_title(gpu: Gpu, devices: Devices) -> str:
    """Return a title such as `GPU 0 · NVIDIA H100`, with a remark if the engine uses this one of several GPUs."""
    suffix = " · the engine's" if gpu.index in devices.used_gpus and len(devices.gpus) > 1 else ""
    return " · ".join(filter(None, (f"GPU {gpu.index}", gpu.name))) + suffix


def gpu_state(gpu: Gpu) -> tuple[str, str]:
    """Return a text on faults and throttling ("" if unknown), and the name of its theme colour: "bad", "warn" or
    "muted".
    """
    if gpu.fault:
        return f"Does not answer: {gpu.fault}", "bad"
    if gpu.ecc_uncorrected:
        return f"{plural(gpu.ecc_uncorrected, 'error')} in its memory, uncorrected", "bad"
    if gpu.throttled_by is None:
        return "", "muted"
    if is_slowed(gpu.throttled_by):
        return f"Slowed down: {reasons_text(gpu.throttled_by)}", "warn"
    return reasons_text(gpu.throttled_by).capitalize() or "At full clock speed", "muted"


def gpu_figures(gpu: Gpu) -> list[DeviceFigure]:
    return [
        DeviceFigure("Busy", percent(gpu.utilization, 0), "Share of time that a kernel was running"),
        DeviceFigure(
            "Memory utilization", percent(gpu.memory_utilization, 0), "Share of time that memory was read or written"
        ),
        DeviceFigure(
            "Power", _with_limit(_watts(gpu.power_watts), _watts(gpu.power_limit_watts)), "Now, and the limit"
        ),
        DeviceFigure(
            "Temperature", _temperatures(gpu), "Temperature of the chip, and of its memory if the driver reports it"
        ),
        DeviceFigure(
            "GPU clock", _with_limit(_mhz(gpu.sm_clock_mhz), _mhz(gpu.max_sm_clock_mhz)), "Now, and the maximum"
        ),
        DeviceFigure(
            "Memory clock",
            _with_limit(_mhz(gpu.memory_clock_mhz), _mhz(gpu.max_memory_clock_mhz)),
            "Now, and the maximum",
        ),
        DeviceFigure("PCIe", _traffic(gpu.pcie_sent_bytes_s, gpu.pcie_received_bytes_s), _pcie_meaning(gpu)),
        DeviceFigure(
            "NVLink",
            _traffic(gpu.nvlink_sent_bytes_s, gpu.nvlink_received_bytes_s),
            "Sent ↑ and received ↓ by the GPU per second, all links; unknown without NVLink",
        ),
        DeviceFigure(
            "ECC errors",
            _errors(gpu),
            "Memory errors since the driver was loaded: corrected, uncorrected",
            is_bad=bool(gpu.ecc_uncorrected),
        ),
        *([DeviceFigure("Fan", percent(gpu.fan, 0), "Of the maximum speed")] if gpu.fan is not None else []),
    ]


def host_figures(host: Host) -> list[DeviceFigure]:
    return [
        DeviceFigure(
            "CPU utilization", _with_limit(percent(busy_share(host), 0), plural(len(host.cores or ()), "core")), "Total"
        ),
        DeviceFigure("Memory used", num_bytes(host_used_bytes(host)), "Memory that cannot be freed without swapping"),
        DeviceFigure("Available", num_bytes(host.memory_available_bytes), "Free memory and most of the file cache"),
        DeviceFigure("File cache", num_bytes(host.cached_bytes), "The system frees it when needed"),
        DeviceFigure(
            "Swap used",
            _with_limit(num_bytes(host.swap_used_bytes), num_bytes(host.swap_total_bytes))
            if host.swap_total_bytes
            else "none",
            "Memory swapped to disk",
            is_bad=bool(host.swap_used_bytes),
        ),
    ]


def memory_line(used: int | None, total: int | None) -> str:
    return _with_limit(num_bytes(used), num_bytes(total))


def gpu_memory_line(gpu: Gpu) -> str:
    return memory_line(used_bytes(gpu), gpu.memory_total_bytes)


def no_gpu_text(devices: Devices) -> str:
    return f"No NVIDIA GPU detected: {devices.fault}" if devices.fault and not devices.gpus else ""


def rate_text(value: float | None) -> str:
    return UNKNOWN if value is None else f"{num_bytes(value)}/s"


def _with_limit(current: str, limit: str) -> str:
    return current if limit == UNKNOWN or current == UNKNOWN else f"{current} of {limit}"


def _watts(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f} W"


def _mhz(value: int | None) -> str:
    return UNKNOWN if value is None else f"{count(value)} MHz"


def _temperatures(gpu: Gpu) -> str:
    chip = UNKNOWN if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f} °C"
    if gpu.memory_temperature_celsius is None:
        return chip
    return f"{chip}, memory {gpu.memory_temperature_celsius:.0f} °C"


def _traffic(sent: int | None, received: int | None) -> str:
    if sent is None and received is None:
        return UNKNOWN
    return f"↑ {rate_text(sent)} ↓ {rate_text(received)}"


def _pcie_meaning(gpu: Gpu) -> str:
    is_known = gpu.pcie_generation and gpu.pcie_width
    link = f", over {gpu.pcie_width} lanes of generation {gpu.pcie_generation}" if is_known else ""
    return f"Sent ↑ and received ↓ by the GPU per second{link}"


def _errors(gpu: Gpu) -> str:
    def number(value: int | None) -> str:
        return NOTHING if value is None else count(value)

    if gpu.ecc_corrected is None and gpu.ecc_uncorrected is None:
        return UNKNOWN
    return f"{number(gpu.ecc_corrected)} corrected, {number(gpu.ecc_uncorrected)} uncorrected"
