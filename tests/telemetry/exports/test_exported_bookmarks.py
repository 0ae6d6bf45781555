"""Bookmarks and alarms in exports: those in the file and those stored next to it, limited to the range."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as trace_pb2

from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.bookmark import Bookmark

BEGIN, END, INSTANT = 1, 2, 3
KV_USAGE = "KV usage high"
HOSTILE = '=1+1 "<script>alert(1)</script>'
Messages = Callable[..., list[TelemetryMessage]]


def recording_with_bookmarks(make_messages: Messages, folder: Path) -> tuple[Recording, list[Bookmark]]:
    """Return a recording of 12 s with an edited note, a deleted note and a 3 s alarm, and one note stored next to the
    file.
    """
    messages = make_messages(600)  # call once: the hello contains the current time
    with RecordingWriter(folder / "session.mcap") as writer:
        for message in messages:
            writer.write(message, wait=True)
    start_ns = Recording.open(writer.path).start_ns

    def at(second: float) -> int:
        return start_ns + round(second * 1e9)

    said = [
        Bookmark(bookmark_id="a", time_ns=at(2), text="before"),
        Bookmark(bookmark_id="a", time_ns=at(2), text=HOSTILE, revision=1),
        Bookmark(bookmark_id="b", time_ns=at(3), text="gone"),
        Bookmark(bookmark_id="b", time_ns=at(3), revision=1, is_deleted=True),
        Bookmark(bookmark_id="c", time_ns=at(4), until_ns=at(7), kind=KV_USAGE, text="up to 99.0 %", revision=1),
    ]
    with RecordingWriter(folder / "marked.mcap") as writer:
        for message in messages:
            writer.write(message, wait=True)
        for bookmark in said:
            writer.add_bookmark(bookmark)
    beside = [Bookmark(bookmark_id="d", time_ns=at(9), text="beside the file")]
    return Recording.open(writer.path), beside


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_bookmarks_table_has_the_latest_revisions(make_messages: Messages, tmp_path: Path) -> None:
    recording, beside = recording_with_bookmarks(make_messages, tmp_path)
    export(recording, ExportTarget.from_path(tmp_path / "bookmarks.csv"), bookmarks=beside)
    rows = rows_of(tmp_path / "bookmarks.csv")
    assert [(row["bookmark_id"], row["kind"], float(row["length_s"])) for row in rows] == [
        ("a", "note", 0.0),
        ("c", KV_USAGE, 3.0),
        ("d", "note", 0.0),
    ]
    assert rows[1]["name"] == "KV usage high: up to 99.0 %"
    assert rows[2]["text"] == "beside the file"


def test_bookmarks_table_of_a_range_has_overlapping_ones(make_messages: Messages, tmp_path: Path) -> None:
    recording, beside = recording_with_bookmarks(make_messages, tmp_path)
    until_s = (beside[0].time_ns - recording.start_ns) / 1e9 - 1
    export(recording, ExportTarget.from_path(tmp_path / "bookmarks.csv"), until_s - 3, until_s, bookmarks=beside)
    assert [row["bookmark_id"] for row in rows_of(tmp_path / "bookmarks.csv")] == ["c"]


def test_trace_has_instants_for_bookmarks_and_slices_for_durations(make_messages: Messages, tmp_path: Path) -> None:
    recording, beside = recording_with_bookmarks(make_messages, tmp_path)
    path = tmp_path / "x.perfetto-trace"
    export(recording, ExportTarget.from_path(path), bookmarks=beside)
    trace = trace_pb2.Trace()
    trace.ParseFromString(path.read_bytes())
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    events = [
        (p.track_event.type, p.track_event.name, p.timestamp)
        for p in trace.packet
        if p.HasField("track_event") and tracks[p.track_event.track_uuid].name in ("Bookmarks", "Alarms")
    ]
    instants = [(name, time_ns) for kind, name, time_ns in events if kind == INSTANT]
    assert [name for name, _ in instants][::2] == [HOSTILE, "beside the file"]
    assert instants[2][1] == beside[0].time_ns
    (begin_ns,) = [time_ns for kind, _, time_ns in events if kind == BEGIN]
    (end_ns,) = [time_ns for kind, _, time_ns in events if kind == END]
    assert (begin_ns, end_ns - begin_ns) == (instants[1][1], 3_000_000_000)


def test_report_lists_bookmarks_and_marks_them_in_every_chart(make_messages: Messages, tmp_path: Path) -> None:
    recording, beside = recording_with_bookmarks(make_messages, tmp_path)
    export(recording, ExportTarget.from_path(tmp_path / "r.html"), bookmarks=beside)
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Bookmarks and alarms" in page
    assert "beside the file" in page
    assert HOSTILE not in page
    pictures = page.split("<svg viewBox")[1:]
    assert len(pictures) >= 4
    assert all(picture.count('class="bookmark-flag') == 3 for picture in pictures)
    assert all(picture.count('class="period"') == 1 for picture in pictures)
    export(recording, ExportTarget.from_path(tmp_path / "none.html"), 0, 1)
    assert "Bookmarks and alarms" not in (tmp_path / "none.html").read_text(encoding="utf-8")
