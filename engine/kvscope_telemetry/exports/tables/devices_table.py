"""Table of devices: one row per GPU and one for the host for each sample taken on the engine's machine.

Owns the columns and their units. Values that were not reported are empty, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from kvscope_telemetry.exports.content import Content
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.exports.tables.recording_description import about
from kvscope_telemetry.exports.tables.table import Column, Table
from kvscope_telemetry.messages.devices import Devices, Gpu, Host
from kvscope_telemetry.messages.telemetry import TelemetryMessage

_Figure = tuple[str, str, str]
"""Field of `Gpu` (also the column's name), unit and description."""

_FLOATS: Final[tuple[_Figure, ...]] = (
    ("utilization", "share", "share of the time in which a kernel ran; for the host: average utilization of all cores"),
    ("memory_utilization", "share", "share of the time in which memory was read or written"),
    ("power_watts", "W", "power of the whole card"),
    ("power_limit_watts", "W", "enforced power limit"),
    ("temperature_celsius", "°C", "temperature of the chip"),
    ("memory_temperature_celsius", "°C", "temperature of the memory"),
    ("fan", "share", "share of the full speed"),
)
_INTS: Final[tuple[_Figure, ...]] = (
    ("memory_total_bytes", "bytes", "total memory"),
    ("memory_used_bytes", "bytes", "memory used by processes; host: memory not available to processes"),
    ("memory_reserved_bytes", "bytes", "memory reserved by driver and firmware"),
    ("memory_free_bytes", "bytes", "free memory"),
    ("sm_clock_mhz", "MHz", "clock of the chip"),
    ("memory_clock_mhz", "MHz", "clock of the memory"),
    ("ecc_corrected", "errors", "corrected memory errors since the driver was loaded"),
    ("ecc_uncorrected", "errors", "uncorrected memory errors since the driver was loaded"),
    ("pcie_sent_bytes_s", "bytes/s", "from the GPU"),
    ("pcie_received_bytes_s", "bytes/s", "to the GPU"),
    ("nvlink_sent_bytes_s", "bytes/s", "over all links"),
    ("nvlink_received_bytes_s", "bytes/s", "over all links"),
)
_Row = tuple[int, Devices, Gpu | Host]


def devices_table(content: Content) -> Table:
    """Return one row per device and sample, sorted by time; empty if no devices were recorded."""
    span, rows = content.span, _rows(content.messages(), content.span)
    times = np.array([time_ns for time_ns, _, _ in rows], np.int64)
    devices = [device for _, _, device in rows]
    columns = (
        Column("time_ns", "time", times, "ns", "since 1970"),
        Column("second_s", "float", (times - span.start_ns) / 1e9, "s", "the same from the recording's start"),
        Column("epoch", "int", [sample.epoch for _, sample, _ in rows], "", "start of the engine"),
        Column("kind", "text", [_kind(device) for device in devices], "", "gpu or host"),
        Column("index", "int", [_number(device, "index") for device in devices], "", "the driver's index of the GPU"),
        Column("name", "text", [device.name for device in devices], "", "name of the GPU, or of the host's processor"),
        Column("uuid", "text", [str(getattr(device, "uuid", "")) for device in devices], "", "UUID of the GPU"),
        Column(
            "is_used",
            "int",
            [_is_used(sample, device) for _, sample, device in rows],
            "",
            "1 if the engine computes on this GPU, otherwise 0",
        ),
        *(Column(name, "float", _floats(devices, name), unit, text) for name, unit, text in _FLOATS),
        *(Column(name, "int", [_number(device, name) for device in devices], unit, text) for name, unit, text in _INTS),
        Column("throttled_by", "text", [_reasons(device) for device in devices], "", "reasons for reduced clocks"),
        Column(
            "fault",
            "text",
            [str(getattr(device, "fault", "")) for device in devices],
            "",
            "why the device reports nothing; empty if it does",
        ),
    )
    return Table("devices", columns, about(content.recording, span))


def _rows(messages: Iterable[tuple[int, TelemetryMessage]], span: Span) -> list[_Row]:
    rows: list[_Row] = []
    for time_ns, message in messages:
        if not isinstance(message, Devices) or not span.from_ns <= time_ns <= span.until_ns:
            continue
        rows += [(time_ns, message, gpu) for gpu in message.gpus]
        if message.host is not None:
            rows.append((time_ns, message, message.host))
    return rows


def _kind(device: Gpu | Host) -> str:
    return "gpu" if isinstance(device, Gpu) else "host"


def _is_used(sample: Devices, device: Gpu | Host) -> int | None:
    return int(device.index in sample.used_gpus) if isinstance(device, Gpu) else None


def _reasons(device: Gpu | Host) -> str:
    return " ".join(device.throttled_by or ()) if isinstance(device, Gpu) else ""


def _number(device: Gpu | Host, field: str) -> int | None:
    if isinstance(device, Host) and field == "memory_used_bytes":
        total, available = device.memory_total_bytes, device.memory_available_bytes
        return None if total is None or available is None else total - available
    value = getattr(device, field, None)
    return None if value is None else int(value)


def _floats(devices: list[Gpu | Host], field: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array([_float(device, field) for device in devices], np.float64)


def _float(device: Gpu | Host, field: str) -> float:
    if isinstance(device, Host) and field == "utilization":
        return float(np.mean(device.cores)) if device.cores else float("nan")
    value = getattr(device, field, None)
    return float("nan") if value is None else float(value)
