"""All exports of a recording have the same values at the same times, and they are those of `Recording.state_at`."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as parquet
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as trace_pb2

from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.exports.run_summary import summarize_run
from kvscope_telemetry.exports.span import span_of
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording

COUNTER = 4
"""Perfetto's event type of a counter value."""
NUM_MOMENTS = 12
START_NS = 1_790_000_000_000_000_000
"""A whole second in 2026."""

Points = dict[int, list[float]]
"""Values by time in nanoseconds. A frame on the border of two seconds adds its level after that of the ended second."""


@pytest.fixture(params=["sample", "sample-hybrid", "simulated-0", "simulated-136", "simulated-500"])
def recording(
    request: pytest.FixtureRequest,
    record: Callable,  # type: ignore[type-arg]
    make_messages: Callable[..., list[TelemetryMessage]],
) -> Recording:
    """Recording of two samples, or of a simulated engine started 0, 136 and 500 ms after the start of a second."""
    if request.param.startswith("simulated"):
        wall_ns = START_NS + int(request.param.split("-")[1]) * 1_000_000
        hello, snapshot, *frames = make_messages(900)
        hello = msgspec.structs.replace(hello, wall_time_ns=wall_ns)
        return Recording.open(record([hello, msgspec.structs.replace(snapshot, hello=hello), *frames]).path)
    with resources.as_file(resources.files("kvscope_resources") / f"{request.param}.mcap") as path:
        return Recording.open(path)


def metrics_of(recording: Recording, folder: Path) -> dict[str, list[float]]:
    export(recording, ExportTarget.from_path(folder / "metrics.csv"))
    with (folder / "metrics.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name] or "nan") for row in rows] for name in rows[0] if not name.endswith("_utc")}


def counters_of(recording: Recording, folder: Path) -> dict[str, Points]:
    export(recording, ExportTarget.from_path(folder / "run.pftrace"))
    trace = trace_pb2.Trace()
    trace.ParseFromString((folder / "run.pftrace").read_bytes())
    names = {p.track_descriptor.uuid: p.track_descriptor.name for p in trace.packet if p.HasField("track_descriptor")}
    found: dict[str, Points] = {}
    for packet in trace.packet:
        if packet.HasField("track_event") and packet.track_event.type == COUNTER:
            points = found.setdefault(names[packet.track_event.track_uuid], {})
            points.setdefault(packet.timestamp, []).append(packet.track_event.double_counter_value)
    return found


def highest_usage(recording: Recording) -> tuple[float, float]:
    """Return the largest share of the pool that is active after any frame, and the second of its first occurrence."""
    peak, at_s = 0.0, 0.0
    follower = Follower()
    for seconds, message in recording.messages():
        follower.feed(message)
        follower.apply_pending()
        usage = follower.mirror.num_active / recording.info.hello.cache.num_blocks
        if usage > peak:
            peak, at_s = usage, seconds
    return peak, at_s


def test_peak_usage_and_its_time_are_those_of_the_fullest_frame_everywhere(
    recording: Recording, tmp_path: Path
) -> None:
    peak, at_s = highest_usage(recording)
    figures = summarize_run(recording, read_overview(recording), span_of(recording))
    assert figures.peak_usage == pytest.approx(peak)
    assert figures.peak_usage_s == pytest.approx(at_s, abs=1e-6)
    assert max(metrics_of(recording, tmp_path)["peak_usage"]) == pytest.approx(peak)
    usage = counters_of(recording, tmp_path)["KV usage"]
    largest = max(value for values in usage.values() for value in values)
    assert largest == pytest.approx(100 * peak)
    first_ns = min(time_ns for time_ns, values in usage.items() if largest in values)
    assert (first_ns - recording.start_ns) / 1e9 == pytest.approx(at_s, abs=1e-6)
    export(recording, ExportTarget.from_path(tmp_path / "report.html"))
    shown = re.search(r"<dt>KV usage, peak</dt><dd>([\d.]+)", (tmp_path / "report.html").read_text("utf-8"))
    assert shown is not None
    assert float(shown[1]) == pytest.approx(100 * peak, abs=0.051)


def test_exported_levels_of_each_second_equal_the_recorded_state_at_its_end(
    recording: Recording, tmp_path: Path
) -> None:
    metrics, counters = metrics_of(recording, tmp_path), counters_of(recording, tmp_path)
    export(recording, ExportTarget.from_path(tmp_path / "metrics.parquet"))
    typed = parquet.read_table(tmp_path / "metrics.parquet")
    num_blocks = recording.info.hello.cache.num_blocks
    last = len(metrics["second_s"]) - 1
    for row in np.linspace(0, last, NUM_MOMENTS).round().astype(int).tolist():
        time_ns = typed.column("time_ns").cast("int64")[row].as_py()
        # A frame on the border is the next second's; the last second ends with the last frame.
        mirror = recording.state_at((time_ns - (row != last) - recording.start_ns) / 1e9)
        usage = mirror.num_active / num_blocks
        assert metrics["usage"][row] == pytest.approx(usage), row
        assert typed.column("usage")[row].as_py() == pytest.approx(usage), row
        assert counters["KV usage"][time_ns][0] == pytest.approx(100 * usage), row
        for column, track in (("num_running", "Running"), ("num_waiting", "Waiting")):
            level = getattr(mirror.counters, column)
            assert metrics[column][row] == counters[track][time_ns][0] == level, (row, column)
