"""The ring: its segments, its bounds, and that the session continues whatever happens to the disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.processes import needs_unix
from tests.simulated_engine.command import ROOT

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import DeviceSample, Frame, Heartbeat
from kvscope_telemetry.recordings.mcap_file import McapFile
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring import MAX_SECONDS, SEGMENT_S, Ring
from kvscope_telemetry.recordings.ring_folder import segments_in
from kvscope_telemetry.recordings.ring_segments import MIN_SEGMENTS

MakeRing = Callable[..., Ring]
MakeSession = Callable[..., Any]


def test_each_segment_opens_on_its_own(
    make_ring: MakeRing, make_session: MakeSession, assert_same_state: Callable[..., None]
) -> None:
    ring = make_ring()
    session = make_session(ring)
    session.advance(700)
    assert ring.flush(60.0)
    paths = segments_in(ring.folder)
    assert list(paths) == list(range(1, len(paths) + 1))
    assert len(paths) >= 5
    assert [path.suffix for path in paths.values()] == [".mcap"] * (len(paths) - 1) + [".part"]
    for path in paths.values():
        segment = Recording.open(path)
        assert segment.info.epochs == (1,)
        middle_s = segment.info.duration_s / 2
        expected = session.mirror_at(segment.start_ns + round(middle_s * 1e9))
        assert_same_state(segment.state_at(middle_s), expected)
        assert segment.state_at(0).num_blocks == 300
    seqs = [frame.seq for path in paths.values() for frame in Recording.open(path).frames()]
    assert seqs == list(range(1, 701))
    ring.close(keep=True)
    assert Recording.open(paths[len(paths)].with_suffix("")).info.is_complete


STEP_NS, HEARTBEAT_NS = 20_000_000, 500_000_000


def write_idle_seconds(session: Any, seconds: float, epoch: int = 1) -> None:
    """Write the heartbeats and samples of an idle engine."""
    for count in range(round(seconds * 1e9 / HEARTBEAT_NS)):
        session.pass_time(HEARTBEAT_NS - STEP_NS)
        now_ns = session.tick()
        session.write(Heartbeat(epoch=epoch, time_ns=now_ns, seq=session.engine.seq, step=session.engine.seq))
        if count % 2:
            session.write(DeviceSample(epoch=epoch, time_ns=now_ns, utilization=0.0))


def kept_frames(ring: Ring) -> list[int]:
    assert ring.flush(60.0)
    return [frame.seq for frame in Recording.open(ring.folder, origin_ns=ring.origin_ns).frames()]


def test_frames_after_an_idle_period_stay_for_the_promised_time(
    make_ring: MakeRing, make_session: MakeSession, assert_same_state: Callable[..., None]
) -> None:
    ring = make_ring(max_seconds=MAX_SECONDS, segment_seconds=SEGMENT_S)
    session = make_session(ring)
    write_idle_seconds(session, 540.0)
    session.advance(10)
    for _ in range(59):
        write_idle_seconds(session, 10.0)
        assert kept_frames(ring) == list(range(1, 11))
        assert ring.start_ns is not None
        assert ring.end_ns is not None
        assert ring.end_ns - ring.start_ns >= min(MAX_SECONDS * 1e9, ring.end_ns - session.times_ns[0])
    at_ns = session.times_ns[0] + round(900e9)
    reader = Recording.open(ring.folder, origin_ns=ring.origin_ns)
    assert_same_state(reader.state_at(900.0), session.mirror_at(at_ns))
    write_idle_seconds(session, 100.0)
    assert kept_frames(ring) == []
    ring.close()


def test_recent_history_of_an_idle_engine_keeps_its_maximum_length_in_few_segments(
    make_ring: MakeRing, make_session: MakeSession
) -> None:
    ring = make_ring(max_seconds=MAX_SECONDS, segment_seconds=SEGMENT_S)
    session = make_session(ring)
    session.advance(10)
    write_idle_seconds(session, 3000.0)
    assert ring.flush(60.0)
    assert ring.start_ns is not None
    assert ring.end_ns is not None
    assert MAX_SECONDS <= (ring.end_ns - ring.start_ns) / 1e9 <= MAX_SECONDS * (1 + 1 / MIN_SEGMENTS) + 1
    assert len(segments_in(ring.folder)) <= MIN_SEGMENTS + 2
    ring.close()


@pytest.mark.parametrize("silent_s", [540.0, 7200.0])
def test_segment_ends_before_a_silent_period(make_ring: MakeRing, make_session: MakeSession, silent_s: float) -> None:
    """A suspended engine sends nothing: older messages expire, and the new ones do not expire with them."""
    ring = make_ring(max_seconds=MAX_SECONDS, segment_seconds=SEGMENT_S)
    session = make_session(ring)
    session.advance(10)
    session.pass_time(round(silent_s * 1e9))
    session.advance(10)
    write_idle_seconds(session, 50.0)
    assert kept_frames(ring) == list(range(11 if silent_s > MAX_SECONDS else 1, 21))
    write_idle_seconds(session, 500.0)
    assert kept_frames(ring) == list(range(11, 21))
    assert ring.start_ns is not None
    assert ring.end_ns is not None
    assert ring.end_ns - ring.start_ns >= MAX_SECONDS * 1e9
    ring.close()


def test_engine_with_clocks_set_back_loses_no_history(make_ring: MakeRing, make_session: MakeSession) -> None:
    ring = make_ring(max_seconds=MAX_SECONDS, segment_seconds=SEGMENT_S)
    session = make_session(ring)
    session.advance(10)
    write_idle_seconds(session, 300.0)
    session.pass_time(-200 * 10**9)
    session.restart(2)
    session.advance(10)
    assert kept_frames(ring) == [*range(1, 11), *range(1, 11)]
    assert ring.start_ns == session.times_ns[0]
    ring.close()


def test_engine_with_its_wall_clock_ahead_loses_no_history(make_ring: MakeRing, make_session: MakeSession) -> None:
    """This happens after the machine was suspended, while the engine's own clock stood still."""
    ring = make_ring(max_seconds=MAX_SECONDS, segment_seconds=SEGMENT_S)
    session = make_session(ring)
    session.advance(10)
    write_idle_seconds(session, 100.0)
    session.restart(2, wall_ahead_ns=7200 * 10**9)
    session.advance(10)
    write_idle_seconds(session, 400.0, epoch=2)
    assert kept_frames(ring) == [*range(1, 11), *range(1, 11)]
    write_idle_seconds(session, 190.0, epoch=2)
    assert kept_frames(ring) == [*range(1, 11)], "the frames of the first engine are older"
    ring.close()


def test_oldest_segments_are_deleted_beyond_the_maximum_duration(
    make_ring: MakeRing, make_session: MakeSession
) -> None:
    ring = make_ring(max_seconds=8.0)
    session = make_session(ring)
    session.advance(1500)
    assert ring.flush(60.0)
    assert ring.start_ns is not None
    assert ring.end_ns is not None
    assert ring.origin_ns is not None
    assert 8e9 <= ring.end_ns - ring.start_ns <= 9.1e9
    assert ring.origin_ns == session.times_ns[0]
    left = segments_in(ring.folder)
    assert Recording.open(next(iter(left.values()))).start_ns == ring.start_ns
    assert 1 not in left
    assert len(left) <= 10
    ring.set_bounds(max_bytes=1 << 30, max_seconds=2.0)
    session.advance(60)
    assert ring.flush(60.0)
    assert 2e9 <= ring.end_ns - ring.start_ns <= 3.1e9
    ring.close()


def test_oldest_segments_are_deleted_beyond_the_maximum_size(make_ring: MakeRing, make_session: MakeSession) -> None:
    ring = make_ring(max_bytes=200_000, segment_seconds=1e6, keyframe_interval_ns=10**12)
    session = make_session(ring)
    for _ in range(20):
        session.advance(100)
        assert ring.flush(60.0)
        on_disk = sum(path.stat().st_size for path in segments_in(ring.folder).values())
        assert ring.num_bytes == on_disk <= 200_000
    assert ring.num_bytes > 100_000
    assert 1 not in segments_in(ring.folder)
    ring.set_bounds(max_bytes=50_000, max_seconds=600)
    assert ring.flush(60.0)
    assert ring.num_bytes < 60_000
    ring.close()


@pytest.mark.parametrize("bounds", [{"max_bytes": 0}, {"max_seconds": 0.0}, {"max_seconds": float("nan")}])
def test_recent_history_with_invalid_size_or_time_limits_is_refused(
    make_ring: MakeRing, bounds: dict[str, float]
) -> None:
    with pytest.raises(BadInput, match="is not accepted"):
        make_ring(**bounds)


def test_closed_ring_is_deleted_unless_kept(make_ring: MakeRing, make_session: MakeSession) -> None:
    gone, kept = make_ring("gone"), make_ring("kept")
    for ring, keep in ((gone, False), (kept, True)):
        make_session(ring).advance(200)
        (ring.folder / "another's").touch() if keep else None
        assert os.stat(ring.folder).st_mode & 0o777 == 0o700
        ring.close(keep=keep)
        ring.close(keep=keep)
        assert not ring.failure
    assert not gone.folder.exists()
    assert all(path.suffix == ".mcap" for path in segments_in(kept.folder).values())
    assert len(segments_in(kept.folder)) >= 2


def test_ring_continues_with_a_snapshot_after_a_gap(make_ring: MakeRing, make_session: MakeSession) -> None:
    ring = make_ring()
    session = make_session(ring)
    session.advance(100)
    for _ in range(10):
        session.engine.advance()
    session.write(session.engine.snapshot())
    session.advance(100)
    ring.close(keep=True)
    last = Recording.open(list(segments_in(ring.folder).values())[-1])
    assert last.state_at(1e9).seq == 210


def test_folder_of_one_recent_history_is_refused_for_another(make_ring: MakeRing, make_session: MakeSession) -> None:
    ring = make_ring()
    make_session(ring).advance(10)
    assert ring.flush(60.0)
    second = make_ring()
    assert "another process is writing to it" in second.failure
    assert not second.write(Heartbeat(epoch=1, time_ns=1, seq=1, step=1))
    assert not second.flush()
    second.close()
    ring.close(keep=True)
    assert "there is a ring in it already" in make_ring().failure


def test_unsuitable_folder_for_a_recent_history_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file: give a folder" in Ring(tmp_path / "file").failure
    assert Ring(tmp_path / "file" / "below").failure
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)  # whatever the umask is
    assert "others can read it" in Ring(open_to_all).failure


def test_ring_resumes_when_its_folder_is_writable_again(
    make_ring: MakeRing,
    make_session: MakeSession,
    monkeypatch: pytest.MonkeyPatch,
    assert_same_state: Callable[..., None],
) -> None:
    """Root can write to read-only folders, so that the test itself raises the error."""
    ring = make_ring(retry_seconds=0.02)
    session = make_session(ring)
    session.advance(10)
    assert ring.flush(60.0)
    opened, tries = Path.open, []

    def refuse(path: Path, mode: str = "r", *rest: Any) -> Any:
        if "x" in mode:
            tries.append(path)
            if len(tries) < 4:
                raise OSError(30, "Read-only file system")
        return opened(path, mode, *rest)

    monkeypatch.setattr(Path, "open", refuse)
    while not ring.pause:
        session.advance(10)
        ring.flush(60.0)
    assert "Read-only file system; retrying" in ring.pause
    until_s = time.monotonic() + 60.0
    while ring.pause and time.monotonic() < until_s:
        session.advance(10)
        ring.flush(60.0)
    assert not ring.pause
    assert len(tries) >= 4
    assert 0 < ring.num_dropped < len(session.messages)
    session.advance(200)
    assert ring.flush(60.0)
    ring_recording = Recording.open(ring.folder, origin_ns=ring.origin_ns)
    frames = list(ring_recording.frames())
    assert frames == [frame for frame in session.frames if frame in frames]
    assert len(session.frames) > len(frames) > 200
    assert frames[-1] == session.frames[-1]
    for at_ns in (session.times_ns[5], session.times_ns[-1], session.times_ns[-100]):
        assert_same_state(ring_recording.state_at((at_ns - ring_recording.start_ns) / 1e9), session.mirror_at(at_ns))
    ring.close(keep=True)
    assert len(list(Recording.open(segments_in(ring.folder)[1]).frames())) > 50


def test_segment_that_cannot_be_finished_ends_early(
    make_ring: MakeRing, make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: McapFile) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(McapFile, "finish", full)
    ring = make_ring()
    session = make_session(ring)
    session.advance(60)
    assert ring.flush(60.0)
    for frame in [session.engine.advance() for _ in range(300)]:
        ring.write(frame, wait=True)
    assert not ring.flush(60.0)
    assert "No space left on device" in ring.pause
    assert not ring.failure
    ring.close(keep=True)
    assert len(list(Recording.open(segments_in(ring.folder)[1]).frames())) > 50


FULL = """
import resource, sys, time
from tests.simulated_engine.engine import SimulatedEngine
from kvscope_telemetry.recordings.ring import Ring
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
ring = Ring(sys.argv[1], retry_seconds=0.5)
engine = SimulatedEngine(num_blocks=300)
ring.write(engine.snapshot())
while not ring.pause:
    assert ring.write(engine.advance(), wait=True)
print(ring.pause)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
until_s = time.monotonic() + 60.0
while ring.pause and time.monotonic() < until_s:
    assert ring.write(engine.advance(), wait=True)
    ring.flush(60.0)
for _ in range(200):
    ring.write(engine.advance(), wait=True)
assert ring.flush(60.0), ring.pause
ring.close(keep=True)
print(engine.seq)
"""


@needs_unix
def test_ring_resumes_after_a_full_disk_and_keeps_what_was_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "ring")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "File too large; retrying" in done.stdout
    last = int(done.stdout.split()[-1])
    segments = [Recording.open(path) for path in segments_in(tmp_path / "ring").values()]
    first, *_, again = segments
    seqs = [frame.seq for frame in first.frames()]
    assert seqs == list(range(1, len(seqs) + 1))
    assert len(seqs) > 10
    assert first.state_at(1e9).seq == seqs[-1]
    assert [frame.seq for frame in again.frames()][-1] == last
    assert Recording.open(tmp_path / "ring").state_at(1e9).seq == last


def test_flushed_recent_history_contains_every_frame_written(make_ring: MakeRing, make_session: MakeSession) -> None:
    ring = make_ring()
    session = make_session(ring)
    for count in (1, 2, 3, 50):
        session.advance(count)
        assert ring.flush(60.0)
        frames = [frame for path in segments_in(ring.folder).values() for frame in Recording.open(path).frames()]
        assert frames == session.frames
        assert isinstance(frames[-1], Frame)
    ring.close()
