"""The devices table: one row per device and sample, empty cells where nothing is known."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from tests.telemetry.exports.conftest import MS, story

from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.messages.devices import Devices, Gpu, Host
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.recordings.reader import Recording

GIB = 1 << 30


def sampled(time_ns: int) -> Devices:
    busy = Gpu(index=0, name="a GPU", utilization=0.5, memory_used_bytes=GIB, throttled_by=("power_cap", "hot"))
    host = Host(memory_total_bytes=8 * GIB, memory_available_bytes=3 * GIB, cores=(0.0, 1.0))
    return Devices(epoch=9, time_ns=time_ns, gpus=(busy, Gpu(index=1, fault="GPU is lost")), host=host, used_gpus=(0,))


def with_samples() -> list[TelemetryMessage]:
    messages = story()
    start_ns = messages[1].time_ns  # type: ignore[union-attr]
    return [*messages[:4], sampled(start_ns + 260 * MS), *messages[4:-1], sampled(start_ns + 2000 * MS), messages[-1]]


def rows_of(recording: Recording, path: Path, *span: float) -> list[dict[str, str]]:
    export(recording, ExportTarget.from_path(path), *span)
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_devices_table_has_a_row_per_device_and_sample(record: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    recording = Recording.open(record(with_samples()).path)
    rows = rows_of(recording, tmp_path / "devices.csv")
    assert [row["kind"] for row in rows] == ["gpu", "gpu", "host"] * 2
    busy, lost, host = rows[:3]
    assert (busy["utilization"], busy["memory_used_bytes"], busy["is_used"]) == ("0.5", str(GIB), "1")
    assert busy["throttled_by"] == "power_cap hot"
    assert (lost["fault"], lost["utilization"], lost["memory_used_bytes"], lost["is_used"]) == (
        "GPU is lost",
        "",
        "",
        "0",
    )
    assert (host["utilization"], host["memory_used_bytes"], host["is_used"]) == ("0.5", str(5 * GIB), "")


def test_devices_table_of_a_range_has_only_its_samples(record: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    recording = Recording.open(record(with_samples()).path)
    late = rows_of(recording, tmp_path / "devices.csv", 1.0, 2.5)
    assert len(late) == 3
    assert all(1.0 <= float(row["second_s"]) <= 2.5 for row in late)


def test_devices_table_without_samples_is_empty(record: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    assert rows_of(Recording.open(record(60).path), tmp_path / "devices.csv") == []
