"""Saving chunks as they lie: the same states, messages, summaries and events as telling all of it anew."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mcap.reader
import msgspec
import numpy as np
import pytest

from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.recordings.bundles.hash_lists import decode_part
from kvscope_telemetry.recordings.bundles.listed_keyframes import ListedKeyframe
from kvscope_telemetry.recordings.layout import BUNDLES, HASHES, KEYFRAMES
from kvscope_telemetry.recordings.overview import Part, missing_from, written_parts
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.summary import Summary, encode
from kvscope_telemetry.summaries.turns import TURN
from kvscope_telemetry.timeline import save as saving
from kvscope_telemetry.timeline.ring import Ring
from kvscope_telemetry.timeline.save import save
from kvscope_telemetry.timeline.tape import Tape

Make = Callable[..., Any]


@pytest.fixture(params=["ring", "file", "ring that is written"])
def written(request: pytest.FixtureRequest, tmp_path: Path, make_session: Make) -> Iterator[tuple[Any, Any]]:
    """A session of half a minute with another engine in its middle, in segments of seven seconds or one file."""
    if request.param == "file":
        writer = RecordingWriter(tmp_path / "whole.mcap", keyframe_interval_ns=8_000_000_000)
        session = _told(make_session(writer))
        writer.close()
        yield session, Recording.open(tmp_path / "whole.mcap")
        return
    ring = Ring(tmp_path / "ring", segment_seconds=7.0, keyframe_interval_ns=4_000_000_000)
    session = _told(make_session(ring))
    if request.param == "ring":
        ring.close(keep=True)
    else:
        assert ring.flush(10.0)
    yield session, Tape.open(ring.folder, session.times_ns[0])
    ring.close()


def _told(session: Any) -> Any:
    session.go_on(700)
    session.restart(epoch=2)
    session.go_on(900)
    return session


def test_what_is_taken_is_what_is_told(
    written: Any, tmp_path: Path, assert_same_state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, recorded = written
    end_s = recorded.info.duration_s
    tell = saving._tell
    for number, from_s in enumerate([0.0, random.uniform(0, end_s - 14)]):
        until_s = random.choice([None, random.uniform(from_s + 7, end_s)])
        monkeypatch.setattr(saving, "_tell", _never)
        assert save(recorded, tmp_path / f"taken{number}.mcap", from_s, until_s)
        assert tell(recorded, tmp_path / f"told{number}.mcap", from_s, end_s if until_s is None else until_s, None)
        taken, told = (Recording.open(tmp_path / f"{name}{number}.mcap") for name in ("taken", "told"))
        assert replace(taken.info, num_chunks=0) == replace(told.info, num_chunks=0)
        assert (taken.start_ns, taken.end_ns, taken.note) == (told.start_ns, told.end_ns, "")
        assert _frames(taken) == _frames(told)
        assert _course(taken) == _course(told)
        for at_s in [0.0, taken.info.duration_s, *(random.uniform(0, taken.info.duration_s) for _ in range(8))]:
            at_ns = taken.start_ns + round(at_s * 1e9)
            assert_same_state(taken.state_at(at_s), session.mirror_at(at_ns))
        _check_with_another_reader(taken)


@pytest.mark.parametrize("written", ["ring"], indirect=True)
def test_damage_is_left_out_and_told(written: Any, tmp_path: Path, assert_same_state: Make) -> None:
    session, recorded = written
    file = recorded.segments[1]
    bad = max(
        (chunk for chunk in file.chunks.told if BUNDLES in chunk.counts), key=lambda chunk: chunk.num_bundled or 0
    )
    data = bytearray(file.path.read_bytes())
    data[bad.offset + bad.stored_bytes // 2] ^= 1
    file.path.write_bytes(data)
    assert save(recorded, tmp_path / "part.mcap", 1.0)
    assert "damaged" in recorded.note
    part = Recording.open(tmp_path / "part.mcap")
    whole = [at_ns for at_ns, m in zip(session.times_ns, session.messages, strict=True) if isinstance(m, Frame)]
    assert len(_frames(part)) == sum(at_ns > part.start_ns for at_ns in whole) - bad.num_bundled
    assert_same_state(part.state_at(4.0), session.mirror_at(part.start_ns + 4_000_000_000))
    assert [path.name for path in tmp_path.glob("part*")] == ["part.mcap"]


@pytest.mark.parametrize("written", ["file"], indirect=True)
def test_keyframes_name_the_lists_that_were_taken(written: Any, tmp_path: Path, assert_same_state: Make) -> None:
    session, recorded = written
    assert save(recorded, tmp_path / "part.mcap", recorded.info.duration_s - 13)
    part = Recording.open(tmp_path / "part.mcap")
    channels = part._found.channels
    lists, keyframes = set(), []
    with part._file.open() as file:
        for chunk in sorted(part._found.chunks, key=lambda chunk: chunk.offset):
            for raw in part.chunks._read(file, chunk):
                if raw.channel == channels[HASHES]:
                    told = decode_part(raw.data)
                    assert told is not None
                    lists.add(told.list)
                elif raw.channel == channels[KEYFRAMES]:
                    named = {name for name, _ in msgspec.msgpack.decode(raw.data, type=ListedKeyframe).lists}
                    assert named <= lists, "they lie before it"
                    keyframes.append((chunk.start_ns, named))
    assert any(named for _, named in keyframes)
    for at_ns, _ in keyframes:
        assert_same_state(part.state_at((at_ns - part.start_ns) / 1e9), session.mirror_at(at_ns))
    assert part.num_damaged == 0


def _never(*_: Any) -> bool:
    raise AssertionError("its chunks can be taken")


def _frames(recording: Recording) -> list[Any]:
    return [(round(at_s * 1e9), m) for at_s, m in recording.messages() if isinstance(m, Frame)]


def _course(recording: Recording) -> tuple[list[Summary], Counter[bytes]]:
    """With the bins of each second, where they did not change as well, and turns in order."""
    part = Part.joined(written_parts(recording))
    assert missing_from(recording, part.newest_ns) is None
    summaries, bins = [], None
    for summary in part.summaries:
        bins = bins if summary.bins is None else summary.bins
        turns = np.sort(np.frombuffer(summary.turns or b"", TURN)).tobytes()
        summaries.append(msgspec.structs.replace(summary, bins=bins, turns=turns))
    return summaries, Counter(map(encode, part.events))


def _check_with_another_reader(recording: Recording) -> None:
    with recording.path.open("rb") as file:
        reader = mcap.reader.make_reader(file, validate_crcs=True)
        summary = reader.get_summary()
        assert summary is not None
        assert summary.statistics is not None
        counts = Counter(message.channel_id for _, _, message in reader.iter_messages())
        assert counts == {channel: n for channel, n in summary.statistics.channel_message_counts.items() if n}
        assert summary.statistics.chunk_count == len(summary.chunk_indexes) == len(recording.chunks.found.chunks)
        told = sum(int(each.metadata["frames"]) for each in reader.iter_metadata())
        assert told + counts[1] == recording.info.num_frames
