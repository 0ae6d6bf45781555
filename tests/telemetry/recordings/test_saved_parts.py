"""Saved parts of files and rings, also of rings being written: messages, states and seconds equal the original."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mcap.reader
import pytest

from kvscope_telemetry.messages.telemetry import Event, Frame
from kvscope_telemetry.recordings.overview import OverviewPart, missing_from, written_parts
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring import Ring
from kvscope_telemetry.recordings.save import save
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.summary import SECOND_NS

Make = Callable[..., Any]


@pytest.fixture(params=["ring", "file", "ring that is written"])
def written(request: pytest.FixtureRequest, tmp_path: Path, make_session: Make) -> Iterator[tuple[Any, Any]]:
    """A session of half a minute with an engine restart in its middle, as segments of seven seconds or as one file."""
    if request.param == "file":
        writer = RecordingWriter(tmp_path / "whole.mcap", keyframe_interval_ns=8_000_000_000)
        session = _with_extras(make_session(writer))
        writer.close()
        yield session, Recording.open(tmp_path / "whole.mcap")
        return
    ring = Ring(tmp_path / "ring", segment_seconds=7.0, keyframe_interval_ns=4_000_000_000)
    session = _with_extras(make_session(ring))
    if request.param == "ring":
        ring.close(keep=True)
    else:
        assert ring.flush(10.0)
    yield session, Recording.open(ring.folder, origin_ns=session.times_ns[0])
    ring.close()


def _with_extras(session: Any) -> Any:
    session.advance(700)
    session.restart(epoch=2)
    session.advance(900)
    return session


def test_saved_part_of_a_recording_equals_the_original_in_its_time_range(
    written: Any, tmp_path: Path, assert_same_state: Make
) -> None:
    session, recorded = written
    end_s = recorded.info.duration_s
    for number, from_s in enumerate([0.0, random.uniform(0, end_s - 14)]):
        until_s = random.choice([None, random.uniform(from_s + 7, end_s)])
        save(recorded, tmp_path / f"part{number}.mcap", from_s, until_s)
        part = Recording.open(tmp_path / f"part{number}.mcap")
        until_ns = recorded.end_ns if until_s is None else recorded.start_ns + round(until_s * 1e9)
        assert part.damage_summary == ""
        frames = [
            (at_ns, message)
            for at_ns, message in zip(session.times_ns, session.messages, strict=True)
            if isinstance(message, Frame) and part.start_ns < at_ns <= until_ns
        ]
        assert _frames(part) == frames
        counts = Counter(_key(event) for _, frame in frames for event in frame.events)
        assert Counter(_key(timed.event) for timed in OverviewPart.joined(written_parts(part)).events) == counts
        for at_s in [0.0, part.info.duration_s, *(random.uniform(0, part.info.duration_s) for _ in range(8))]:
            assert_same_state(part.state_at(at_s), session.mirror_at(part.start_ns + round(at_s * 1e9)))
        _check_seconds(part)
        _check_with_another_reader(part)


@pytest.mark.parametrize("written", ["ring"], indirect=True)
def test_damage_is_left_out_of_a_saved_part_and_reported(written: Any, tmp_path: Path, assert_same_state: Make) -> None:
    session, recorded = written
    file = recorded.segments[1]
    bad = max(file.message_chunks, key=lambda chunk: chunk.num_frames or 0)
    data = bytearray(file.path.read_bytes())
    data[bad.offset + bad.stored_bytes // 2] ^= 1
    file.path.write_bytes(data)
    save(recorded, tmp_path / "part.mcap", 1.0)
    assert "damaged" in recorded.damage_summary
    part = Recording.open(tmp_path / "part.mcap")
    whole = [at_ns for at_ns, m in zip(session.times_ns, session.messages, strict=True) if isinstance(m, Frame)]
    assert len(_frames(part)) == sum(at_ns > part.start_ns for at_ns in whole) - bad.num_frames
    for at_s in (4.0, part.info.duration_s):
        assert_same_state(part.state_at(at_s), session.mirror_at(part.start_ns + round(at_s * 1e9)))
    assert [path.name for path in tmp_path.glob("part*")] == ["part.mcap"]


def _frames(recording: Recording) -> list[Any]:
    return [(recording.start_ns + round(at_s * 1e9), m) for at_s, m in recording.messages() if isinstance(m, Frame)]


def _key(event: Event) -> tuple[str, int, int, int]:
    """Key that identifies one event of an engine."""
    return event.kind, event.time_ns, event.number, event.other


def _check_seconds(recording: Recording) -> None:
    part = OverviewPart.joined(written_parts(recording))
    assert missing_from(recording, part.newest_ns) is None
    seconds = [summary.time_ns for summary in part.summaries]
    assert seconds[0] <= recording.start_ns
    assert seconds == sorted(set(seconds))
    assert all(at_ns % SECOND_NS == 0 for at_ns in seconds)


def _check_with_another_reader(recording: Recording) -> None:
    with recording.path.open("rb") as file:
        reader = mcap.reader.make_reader(file, validate_crcs=True)
        summary = reader.get_summary()
        assert summary is not None
        assert summary.statistics is not None
        counts = Counter(message.channel_id for _, _, message in reader.iter_messages())
        assert counts == {channel: n for channel, n in summary.statistics.channel_message_counts.items() if n}
        count = sum(int(each.metadata["count"]) for each in reader.iter_metadata())
        assert count == recording.info.num_frames
