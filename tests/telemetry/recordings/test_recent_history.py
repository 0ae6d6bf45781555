"""Recent history: at any time that is left, the state is right, while the ring is written and overwritten."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.simulated_engine.command import ROOT

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import Frame, Hello, MemoryBreakdown, Snapshot, TelemetryMessage
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.orphaned_rings import find_orphaned_rings, remove_orphaned_rings
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.request_index import recorded_requests
from kvscope_telemetry.recordings.ring import Ring
from kvscope_telemetry.recordings.ring_folder import segments_in
from kvscope_telemetry.recordings.writer import RecordingWriter

MakeRing = Callable[..., Ring]
MakeSession = Callable[..., Any]
SameState = Callable[[Mirror, Mirror], None]
WAIT_S = 60.0


def written_messages(recording: Recording, from_s: float = 0.0) -> list[tuple[float, TelemetryMessage]]:
    """Return seconds and message of all but the hellos, which the writer inserts before the first snapshot."""
    return [(seconds, message) for seconds, message in recording.messages(from_s) if not isinstance(message, Hello)]


def test_segments_of_a_recent_history_read_as_one_recording(make_ring: MakeRing, make_session: MakeSession) -> None:
    ring = make_ring()
    session = make_session(ring)
    session.advance(300)
    session.restart(epoch=2)
    session.advance(300)
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder)
    messages = written_messages(ring_recording)
    assert [message for _, message in messages] == session.messages
    assert [ring_recording.start_ns + round(at_s * 1e9) for at_s, _ in messages] == session.times_ns
    assert (ring_recording.start_ns, ring_recording.first_s, ring_recording.info.epochs) == (
        session.times_ns[0],
        0.0,
        (1, 2),
    )
    assert (ring_recording.info.num_frames, len(ring_recording.segments)) == (600, len(segments_in(ring.folder)))
    assert ring_recording.info.duration_s == (session.times_ns[-1] - session.times_ns[0]) / 1e9
    assert (ring_recording.damage_summary, ring_recording.damage_details) == ("", "")
    alone = recorded_requests(Recording.open(segments_in(ring.folder)[1]))
    requests = recorded_requests(ring_recording)
    assert [each.number for each in requests[: len(alone)]] == [each.number for each in alone]
    assert len(requests) > len(alone)
    for at in (0, 77, 400, 605):
        at_s = (session.times_ns[at] - ring_recording.start_ns) / 1e9
        got = [message for _, message in written_messages(ring_recording, at_s)]
        assert got == [m for m, t in zip(session.messages, session.times_ns, strict=True) if t >= session.times_ns[at]]
    ring.close()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.storm)])
def test_state_at_random_times_is_right_while_the_ring_is_overwritten(
    seed: int, make_ring: MakeRing, make_session: MakeSession, assert_same_state: SameState
) -> None:
    choose = random.Random(seed)
    ring = make_ring(max_seconds=12.0)
    session = make_session(ring)
    session.advance(50)
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder, origin_ns=ring.origin_ns)
    positions: list[float] = []
    for _ in range(30):
        session.advance(choose.randrange(20, 50))
        assert ring.flush(60.0)
        ring_recording.grow()
        assert ring_recording.info.duration_s == (session.times_ns[-1] - session.times_ns[0]) / 1e9
        positions += [
            choose.uniform(ring_recording.first_s, ring_recording.info.duration_s),
            ring_recording.info.duration_s,
            0.0,
        ]
        for at_s in [ring_recording.first_s, *choose.sample(positions, min(3, len(positions)))]:
            at_ns = ring_recording.start_ns + round(max(at_s, ring_recording.first_s) * 1e9)
            assert_same_state(ring_recording.state_at(at_s), session.mirror_at(at_ns))
    assert ring_recording.first_s > 20
    assert ring_recording.start_ns == session.times_ns[0] < segments_start(ring_recording)
    ring.close()


def segments_start(ring_recording: Recording) -> int:
    return Recording.open(next(iter(segments_in(ring_recording.path).values()))).start_ns


def test_reader_of_a_deleted_segment_continues_with_what_is_left(
    make_ring: MakeRing, make_session: MakeSession
) -> None:
    """A reader finishes the segment that is open and continues with the remaining ones."""
    ring = make_ring(max_seconds=10.0)
    session = make_session(ring)
    session.advance(150)
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder)
    begun = ring_recording.messages(keyframes=True)
    assert next(message for _, message in begun if isinstance(message, Frame)).seq == 1
    before = Recording.open(ring.folder)
    session.advance(850)
    assert ring.flush(60.0)
    seqs = [message.seq for _, message in begun if isinstance(message, Frame)]
    assert seqs == sorted(set(seqs))
    assert seqs[0] == 2
    state = before.state_at(0.5)
    assert before.first_s > 0
    assert state.time_ns > session.frames[150].time_ns
    assert before.snapshot_before(0.5) == before.first_s
    assert ring_recording.memory_before(0.1, 1) is None or ring_recording.first_s > 0
    ring_recording.grow()
    assert ring_recording.first_s == before.first_s
    left = [message.seq for message in ring_recording.frames()]
    assert left == list(range(left[0], 1001))
    ring.close()
    assert not ring_recording.grow()
    with pytest.raises(BadInput, match="No such file"):
        ring_recording.state_at(1e9)


def test_memory_and_snapshots_are_found_across_segments(make_ring: MakeRing, make_session: MakeSession) -> None:
    ring = make_ring()
    session = make_session(ring)
    session.advance(500)
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder)
    breakdowns = [
        (at_s, message) for at_s, message in ring_recording.messages() if isinstance(message, MemoryBreakdown)
    ]
    for (at_s, memory), (next_s, _) in itertools.pairwise(breakdowns):
        assert ring_recording.memory_before(at_s, 1) == ring_recording.memory_before((at_s + next_s) / 2, 1) == memory
    assert ring_recording.memory_before(breakdowns[0][0] - 0.001, 1) is None
    assert ring_recording.memory_before(1e9, 2) is None
    keyframes = [at_s for at_s, message in ring_recording.messages(keyframes=True) if isinstance(message, Snapshot)]
    for at_s, next_s in itertools.pairwise(keyframes):
        assert ring_recording.snapshot_before(at_s) == ring_recording.snapshot_before((at_s + next_s) / 2) == at_s
    ring.close()


def test_growing_recording_is_not_read_again_from_its_start(
    make_ring: MakeRing, make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = make_ring(segment_seconds=1e6)
    session = make_session(ring)
    session.advance(1000)
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder)
    opened: list[int] = []
    from kvscope_telemetry.recordings import survey

    read = survey.read_chunk
    monkeypatch.setattr(survey, "read_chunk", lambda file, chunk: opened.append(chunk.offset) or read(file, chunk))
    assert not ring_recording.grow()
    assert opened == []
    session.advance(50)
    assert ring.flush(60.0)
    assert ring_recording.grow()
    assert len(opened) <= 4
    assert len(list(ring_recording.frames())) == 1050
    ring.close()


def test_file_written_by_another_process_is_followed(
    tmp_path: Path, make_session: MakeSession, assert_same_state: SameState
) -> None:
    writer = RecordingWriter(tmp_path / "x.mcap", keyframe_interval_ns=1_000_000_000)
    session = make_session(writer)
    session.advance(100)
    assert writer.flush()
    recording = Recording.open(tmp_path / "x.mcap.part")
    assert recording.may_grow
    assert not recording.grow()
    for _ in range(10):
        session.advance(37)
        assert writer.flush()
        assert recording.grow()
        assert not recording.grow()
        assert [message for _, message in written_messages(recording)] == session.messages
        assert_same_state(recording.state_at(1e9), session.mirror_at(session.times_ns[-1]))
        assert recording.info.num_frames == len(session.frames)
    session.advance(5)
    reading = recording.messages()
    assert next(reading)[1] == session.messages[0].hello
    writer.close()
    assert recording.grow()
    assert [message for _, message in reading] == session.messages
    assert recording.path == tmp_path / "x.mcap"
    assert recording.info.is_complete
    assert not recording.may_grow
    assert not recording.damage_summary
    assert [message for _, message in written_messages(recording)] == session.messages


def test_replaced_file_is_not_read(tmp_path: Path, make_session: MakeSession) -> None:
    writer = RecordingWriter(tmp_path / "x.mcap")
    make_session(writer).advance(10)
    assert writer.flush()
    recording = Recording.open(tmp_path / "x.mcap.part")
    with RecordingWriter(tmp_path / "y.mcap") as other:
        make_session(other).advance(20)
    (tmp_path / "x.mcap.part").rename(tmp_path / "moved.mcap.part")
    (tmp_path / "y.mcap").rename(tmp_path / "x.mcap")
    with pytest.raises(BadInput, match="the file was replaced"):
        recording.grow()
    (tmp_path / "x.mcap").unlink()
    with pytest.raises(BadInput, match="No such file"):
        recording.state_at(0)
    assert recording.segments[0].is_deleted
    (tmp_path / "moved.mcap.part").rename(tmp_path / "x.mcap.part")
    writer.close()


def test_missing_or_invalid_ring_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        Recording.open(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="it is a folder, not a file"):
        Recording.open(tmp_path)
    (tmp_path / "000001.mcap").write_bytes(b"not one")
    with pytest.raises(BadInput, match="not a recording"):
        Recording.open(tmp_path)


def test_unreadable_segment_is_left_out(
    make_ring: MakeRing, make_session: MakeSession, assert_same_state: SameState
) -> None:
    ring = make_ring()
    session = make_session(ring)
    session.advance(500)
    ring.close(keep=True)
    segments_in(ring.folder)[2].write_bytes(b"\0" * 1000)
    ring_recording = Recording.open(ring.folder)
    assert "left out" in ring_recording.damage_summary
    assert "000002.mcap" in ring_recording.damage_details
    assert_same_state(ring_recording.state_at(1e9), session.mirror_at(session.times_ns[-1]))
    assert ring_recording.state_at(ring_recording.info.duration_s / 3).hello is not None


def test_ring_is_played_while_it_is_written(
    make_ring: MakeRing, make_session: MakeSession, assert_same_state: SameState
) -> None:
    ring = make_ring(max_seconds=20.0)
    session = make_session(ring)
    session.advance(200)
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder, origin_ns=ring.origin_ns)
    with PlaybackSource(ring_recording, is_playing=False) as source:
        mirror = Mirror()

        def follow() -> Mirror:
            nonlocal mirror
            assert source.wait(lambda: not source.is_seeking, WAIT_S)
            while (update := source.poll_update()) is not None:
                mirror = Mirror() if source.has_jumped else mirror
                mirror.apply(update)
            return mirror

        for count in (100, 300, 900, 5):
            session.advance(count)
            assert ring.flush(60.0)
            length_s = (session.times_ns[-1] - session.times_ns[0]) / 1e9
            assert source.wait(lambda at_s=length_s: source.duration == at_s, WAIT_S), (
                f"{source.duration} s of {length_s} s are seen; "
                f"{source.failure or source.damage_summary or source.damage_details}"
            )
            source.seek(source.duration)
            assert_same_state(follow(), session.mirror_at(session.times_ns[-1]))
            source.seek(source.duration - 0.7, with_past=False)
            follow()
            source.set_speed(1000.0)
            source.play()
            assert source.wait(lambda: source.is_at_end, WAIT_S)
            assert_same_state(follow(), session.mirror_at(session.times_ns[-1]))
            source.pause()
    ring.close()


def test_hello_message_written_to_a_recent_history_is_read_back(
    tmp_path: Path, make_ring: MakeRing, make_session: MakeSession
) -> None:
    ring = make_ring()
    session = make_session(ring)
    session.advance(150)
    session.write(session.engine.hello)
    session.advance(150)
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder)
    assert sum(isinstance(message, Hello) for _, message in ring_recording.messages()) == 2, (
        "the hello of the snapshot and this one"
    )
    ring.close()


LATE_S = 30.0
"""Maximum delay of a thread that writes each second on a busy machine."""
KILLED = """
import sys, time
from tests.simulated_engine.engine import SimulatedEngine
from kvscope_telemetry.recordings.orphaned_rings import find_orphaned_rings
from kvscope_telemetry.recordings.ring import Ring
ring = Ring(sys.argv[1], segment_seconds=0.4, keyframe_interval_ns=200_000_000)
engine = SimulatedEngine(num_blocks=200, num_running=4)
ring.write(engine.snapshot())
while True:
    frame = engine.advance()
    ring.write(frame, wait=True)
    print(frame.seq, time.time(), flush=True)
    time.sleep(0.002)
"""


def test_sigkill_loses_only_unflushed_frames(tmp_path: Path) -> None:
    choose = random.Random()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / f"ring{i}")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    try:
        for i, process in enumerate(started):
            assert process.stdout is not None
            lines = [process.stdout.readline().split() for _ in range(choose.randrange(200, 500))]
            while not _has_frames(tmp_path / f"ring{i}"):  # flushed automatically every second
                lines.append(process.stdout.readline().split())
            process.kill()
            lines += [line.split() for line in process.stdout if line.endswith("\n")]
            process.wait()
            _assert_all_but_the_newest(tmp_path / f"ring{i}", lines)
        rings = find_orphaned_rings(tmp_path)
        assert len(rings) == 3
        assert all(ring.seconds > 0 and ring.model and ring.num_bytes > 1000 for ring in rings)
        rings[0].discard()
        assert not rings[0].folder.exists()
        assert len(find_orphaned_rings(tmp_path)) == 2
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _has_frames(folder: Path) -> bool:
    try:
        return next(Recording.open(folder).frames(), None) is not None
    except BadInput:
        return False


def _assert_all_but_the_newest(folder: Path, lines: list[list[str]]) -> None:
    ring_recording = Recording.open(folder)
    assert not ring_recording.may_grow
    seqs = [frame.seq for frame in ring_recording.frames()]
    assert seqs == list(range(1, len(seqs) + 1))
    assert ring_recording.state_at(1e9).seq == seqs[-1]
    lines = [line for line in lines if len(line) == 2]
    lost_s = float(lines[-1][1]) - float(lines[seqs[-1] - 1][1]) if seqs[-1] <= len(lines) else 0.0
    assert lost_s < 1.5 + LATE_S, f"{lost_s} s, segments {list(segments_in(folder))}"


def test_ring_of_another_process_is_followed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "ring")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        ring_recording = _opened(tmp_path / "ring")
        seen = 0
        while len(ring_recording.segments) < 4:
            ring_recording.grow()
            seqs = [frame.seq for frame in ring_recording.frames()]
            assert seqs == list(range(1, len(seqs) + 1))
            assert len(seqs) >= seen
            assert ring_recording.state_at(1e9).seq == len(seqs)
            assert ring_recording.may_grow
            seen = len(seqs)
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    ring_recording.grow()
    assert not ring_recording.may_grow


def _opened(folder: Path) -> Recording:
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            return Recording.open(folder)
        except BadInput:
            assert time.monotonic() < until_s
            time.sleep(0.02)


def test_ring_that_is_being_written_is_not_offered_or_discarded(
    make_ring: MakeRing, make_session: MakeSession, tmp_path: Path
) -> None:
    ring = make_ring()
    make_session(ring).advance(100)
    assert ring.flush(60.0)
    assert find_orphaned_rings(tmp_path) == [] == find_orphaned_rings(tmp_path / "nowhere")
    ring.close(keep=True)
    (left,) = find_orphaned_rings(tmp_path)
    assert (left.folder, left.start_ns) == (ring.folder, ring.start_ns)
    other = make_ring("other")
    make_session(other).advance(10)
    with pytest.raises(BadInput, match="another process is writing to it"):
        type(left)(other.folder, "", 0, 0.0, 0).discard()
    other.close()


def test_clock_that_is_years_ahead_discards_no_ring(
    make_ring: MakeRing, make_session: MakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        ring = make_ring(name)
        make_session(ring).advance(10)
        ring.close(keep=True)
    first = find_orphaned_rings(tmp_path)[-1]
    monkeypatch.setattr(time, "time_ns", lambda: first.end_ns + 16 * 365 * 86_400 * 10**9)
    assert remove_orphaned_rings(tmp_path).discarded == []
    age_s = (find_orphaned_rings(tmp_path)[0].end_ns - first.end_ns) / 1e9
    assert [ring.folder.name for ring in remove_orphaned_rings(tmp_path, max_seconds=age_s / 2).discarded] == ["first"]


def test_recent_histories_left_by_crashed_sessions_are_limited_by_size_and_age(
    make_ring: MakeRing, make_session: MakeSession, tmp_path: Path
) -> None:
    """The oldest are discarded first, including unreadable ones; the newest stays even if it is too large."""
    for name in ("first", "second", "third"):
        ring = make_ring(name)
        make_session(ring).advance(100)
        ring.close(keep=True)
    rings = find_orphaned_rings(tmp_path)
    assert [ring.folder.name for ring in rings] == ["third", "second", "first"], "the newest first"
    assert remove_orphaned_rings(tmp_path).discarded == []
    damaged = tmp_path / "unreadable"
    damaged.mkdir()
    (damaged / "lock").touch()
    (damaged / "000001.mcap.part").write_bytes(b"x" * 1000)
    os.utime(damaged / "000001.mcap.part", (0, 0))
    two = rings[0].num_bytes + rings[1].num_bytes
    tidied = remove_orphaned_rings(tmp_path, max_bytes=two)
    assert [ring.folder.name for ring in tidied.kept] == ["third", "second"]
    assert [ring.folder.name for ring in tidied.discarded] == ["first", "unreadable"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["second", "third"]
    assert [ring.folder.name for ring in remove_orphaned_rings(tmp_path, max_bytes=1).kept] == ["third"]
    assert [ring.folder.name for ring in remove_orphaned_rings(tmp_path, max_seconds=-1e6).discarded] == ["third"]
    assert list(tmp_path.iterdir()) == []
