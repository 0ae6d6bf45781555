"""A ring that is being written exports what it still holds."""

from __future__ import annotations

import csv
from contextlib import closing
from pathlib import Path

from tests.telemetry.recordings.conftest import RecordedSession

from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring import Ring


def test_export_of_a_recent_history_contains_the_seconds_it_still_holds(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", max_seconds=20.0, segment_seconds=2.0)
    with closing(ring):
        session = RecordedSession(ring)
        session.advance(900)
        assert ring.flush(60.0)
        ring_recording = Recording.open(tmp_path / "ring", origin_ns=ring.origin_ns)
        assert ring_recording.first_s > 0
        for name in ("requests.csv", "metrics.csv", "report.html", "trace.perfetto-trace"):
            export(ring_recording, ExportTarget.from_path(tmp_path / name))
    with (tmp_path / "metrics.csv").open(encoding="utf-8-sig", newline="") as file:
        seconds = [float(row["second_s"]) for row in csv.DictReader(file)]
    assert seconds[0] >= ring_recording.first_s - 1
    assert len(seconds) > 10
