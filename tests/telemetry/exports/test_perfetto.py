"""Traces, parsed with perfetto's own definitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import unknown_fields
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as trace_pb2

from kvscope_telemetry.exports.export import Wanted, export
from kvscope_telemetry.exports.perfetto.protobuf import varint
from kvscope_telemetry.recordings.reader import Recording

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


def parsed(recording: Recording, path: Path, **span: float) -> Any:
    export(recording, Wanted.of(path), **span)
    trace = trace_pb2.Trace()
    trace.ParseFromString(path.read_bytes())
    return trace


def has_unknown(message: Any) -> bool:
    """Whether a field of it, or of a message in it, has no name in the definitions."""
    if not hasattr(message, "ListFields"):
        return False
    if len(unknown_fields.UnknownFieldSet(message)):
        return True
    for _, value in message.ListFields():
        is_repeated = hasattr(value, "__len__") and not isinstance(value, str | bytes)
        if any(map(has_unknown, value if is_repeated else [value])):
            return True
    return False


def test_tracks_counters_and_slices(record: Callable, tmp_path: Path) -> None:  # type: ignore[type-arg]
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
    num_requests = len(recording.requests())
    assert sum(track.name.startswith("#") for track in names.values()) == num_requests > 30
    usage = next(uuid for uuid, track in counters.items() if track.name == "KV usage")
    values = [p.track_event.double_counter_value for p in trace.packet if p.track_event.track_uuid == usage]
    assert 0 < max(values) <= 100


def test_phases_and_causes_of_a_request(tell: Callable[..., Recording], tmp_path: Path) -> None:
    trace = parsed(tell(), tmp_path / "x.pftrace")
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


def test_a_range_is_cut_at_its_ends(tell: Callable[..., Recording], tmp_path: Path) -> None:
    recording = tell()
    trace = parsed(recording, tmp_path / "x.perfetto-trace", from_s=0.45, until_s=0.6)
    times = [p.timestamp for p in trace.packet if p.HasField("track_event")]
    assert min(times) >= recording.start_ns + 450_000_000
    assert max(times) <= recording.start_ns + 600_000_000
    names = [p.track_event.name for p in trace.packet if p.track_event.type == BEGIN]
    assert "swapped" in names
    assert "queued" not in names


@pytest.mark.parametrize(("value", "data"), [(0, b"\0"), (300, b"\xac\x02"), (-1, b"\xff" * 9 + b"\1")])
def test_varints(value: int, data: bytes) -> None:
    assert varint(value) == data
