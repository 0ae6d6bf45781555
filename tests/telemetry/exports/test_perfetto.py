"""Perfetto traces, parsed with perfetto's own definitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import unknown_fields
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as trace_pb2

from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.exports.perfetto.packets import varint
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.request_index import recorded_requests
from kvscope_telemetry.summaries.bookmark import Bookmark

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


def parsed(recording: Recording, path: Path, **span: float) -> Any:
    export(recording, ExportTarget.from_path(path), **span)
    trace = trace_pb2.Trace()
    trace.ParseFromString(path.read_bytes())
    return trace


def has_unknown(message: Any) -> bool:
    """Return whether the message or a nested one has a field that the definitions do not name."""
    if not hasattr(message, "ListFields"):
        return False
    if len(unknown_fields.UnknownFieldSet(message)):
        return True
    for _, value in message.ListFields():
        is_repeated = hasattr(value, "__len__") and not isinstance(value, str | bytes)
        if any(map(has_unknown, value if is_repeated else [value])):
            return True
    return False


def test_trace_has_tracks_counters_and_slices(record: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
    recording = Recording.open(record(600).path)
    trace = parsed(recording, tmp_path / "x.perfetto-trace")
    assert not has_unknown(trace)
    names = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    assert len(names) == sum(p.HasField("track_descriptor") for p in trace.packet)
    counters = {uuid: track for uuid, track in names.items() if track.HasField("counter")}
    assert {"KV usage", "Running", "Waiting", "Free blocks", "Cached blocks"} <= {t.name for t in counters.values()}
    depth: dict[int, int] = defaultdict(int)
    last_ns: dict[int, int] = defaultdict(int)
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        assert recording.start_ns <= packet.timestamp <= recording.end_ns
        assert event.track_uuid in names
        if event.type == COUNTER:
            assert event.track_uuid in counters
        elif event.type in (BEGIN, END):
            assert packet.timestamp >= last_ns[event.track_uuid]
            last_ns[event.track_uuid] = packet.timestamp
            depth[event.track_uuid] += 1 if event.type == BEGIN else -1
            assert 0 <= depth[event.track_uuid] <= 1
    assert set(depth.values()) == {0}
    num_requests = len(recorded_requests(recording))
    assert sum(track.name.startswith("#") for track in names.values()) == num_requests > 30
    usage = next(uuid for uuid, track in counters.items() if track.name == "KV usage")
    values = [p.track_event.double_counter_value for p in trace.packet if p.track_event.track_uuid == usage]
    assert 0 < max(values) <= 100


def test_trace_has_phases_and_causes_of_a_request(record_story: Callable[..., Recording], tmp_path: Path) -> None:
    trace = parsed(record_story(), tmp_path / "x.pftrace")
    track = next(p.track_descriptor.uuid for p in trace.packet if p.track_descriptor.name == "#1 slow")
    events = [p for p in trace.packet if p.HasField("track_event") and p.track_event.track_uuid == track]
    begun = [(p.track_event.name, p.timestamp) for p in events if p.track_event.type == BEGIN]
    assert [name for name, _ in begun] == ["queued", "prefill", "decode", "swapped", "decode"]
    assert [(at - begun[0][1]) // 1_000_000 for _, at in begun] == [0, 100, 150, 300, 600]
    swapped = next(p.track_event for p in events if p.track_event.name == "swapped")
    notes = {note.name: note.string_value or note.int_value for note in swapped.debug_annotations}
    assert notes["for request"] == "#2"
    assert "needed 3 blocks" in notes["cause"]
    instants = [p.track_event.name for p in events if p.track_event.type == INSTANT]
    assert {"first token", "finished", "swapped"} <= set(instants)
    steps = next(p.track_descriptor.uuid for p in trace.packet if p.track_descriptor.name == "Steps")
    of_steps = [p for p in trace.packet if p.HasField("track_event") and p.track_event.track_uuid == steps]
    assert [p.track_event.type for p in of_steps] == [BEGIN, END] * 8
    assert of_steps[3].timestamp - of_steps[2].timestamp == 10_000_000


def test_trace_of_a_range_is_cut_at_its_ends(record_story: Callable[..., Recording], tmp_path: Path) -> None:
    recording = record_story()
    trace = parsed(recording, tmp_path / "x.perfetto-trace", from_s=0.45, until_s=0.6)
    times = [p.timestamp for p in trace.packet if p.HasField("track_event")]
    assert min(times) >= recording.start_ns + 450_000_000
    assert max(times) <= recording.start_ns + 600_000_000
    names = [p.track_event.name for p in trace.packet if p.track_event.type == BEGIN]
    assert "swapped" in names
    assert "queued" not in names


@pytest.mark.parametrize(("value", "data"), [(0, b"\0"), (300, b"\xac\x02"), (-1, b"\xff" * 9 + b"\1")])
def test_integers_in_a_perfetto_trace_are_encoded_as_protobuf_varints(value: int, data: bytes) -> None:
    assert varint(value) == data


def test_preemption_arrow_leads_from_the_preempting_to_the_preempted_request(
    record_story: Callable[..., Recording], tmp_path: Path
) -> None:
    trace = parsed(record_story(), tmp_path / "x.pftrace")
    names = {p.track_descriptor.uuid: p.track_descriptor.name for p in trace.packet if p.HasField("track_descriptor")}
    events = [(p.timestamp, p.track_event) for p in trace.packet if p.HasField("track_event")]
    begins = [(at, names[e.track_uuid], e.name, list(e.flow_ids)) for at, e in events if e.flow_ids]
    ends = [
        (at, names[e.track_uuid], e.name, list(e.terminating_flow_ids)) for at, e in events if e.terminating_flow_ids
    ]
    assert [(name[:2], what) for _, name, what, _ in begins] == [("#2", "preempts #1")]
    assert [(name, what) for _, name, what, _ in ends] == [("#1 slow", "swapped")]
    assert begins[0][0] == ends[0][0]
    assert begins[0][3] == ends[0][3]
    order = [bool(e.flow_ids) for _, e in events if e.flow_ids or e.terminating_flow_ids]
    assert order == [True, False], "a flow must start before it ends"


def test_overlapping_alarms_share_one_group_of_tracks(record_story: Callable[..., Recording], tmp_path: Path) -> None:
    recording, path = record_story(), tmp_path / "x.pftrace"
    start_ns, ms = recording.start_ns, 1_000_000
    alarms = [
        Bookmark(bookmark_id=str(at), time_ns=start_ns + at * ms, until_ns=start_ns + until * ms, kind=kind, text=kind)
        for at, until, kind in ((10, 100, "kv_usage"), (200, 300, "waiting"), (250, 400, "preemptions"))
    ]
    export(recording, ExportTarget.from_path(path), bookmarks=alarms)
    trace = trace_pb2.Trace()
    trace.ParseFromString(path.read_bytes())
    tracks = [p.track_descriptor for p in trace.packet if p.track_descriptor.name == "Alarms"]
    assert len(tracks) == 2, "two at most last at a time"
    assert {track.sibling_merge_behavior for track in tracks} == {0}, "of one name: shown as one"
    assert len({track.parent_uuid for track in tracks}) == 1
    uuids = {track.uuid for track in tracks}
    begun = [p.timestamp for p in trace.packet if p.track_event.track_uuid in uuids and p.track_event.type == BEGIN]
    assert begun == [alarm.time_ns for alarm in alarms]
