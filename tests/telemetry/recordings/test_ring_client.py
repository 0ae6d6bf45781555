"""A ring written by another process: it holds what it was sent, reports its status, and outlives the sender."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.processes import needs_unix
from tests.simulated_engine.command import ROOT

from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.recordings import ring_client
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring_client import RingClient
from kvscope_telemetry.recordings.ring_folder import RingFolder, is_held, segments_in
from kvscope_telemetry.recordings.ring_packets import (
    PacketKind,
    PacketReader,
    RingStatus,
    decode_status,
    encoded,
    packet,
)
from kvscope_telemetry.summaries.bookmark import new_bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent

WAIT_S = 120.0
MakeSession = Callable[..., Any]


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[RingClient]:
    made = RingClient(tmp_path / "ring")
    yield made
    made.close()


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be so"
        time.sleep(0.01)


def whole_state(ring: RingClient) -> Mirror:
    return Recording.open(ring.folder, origin_ns=ring.origin_ns).state_at(1e9)


def test_ring_process_holds_all_messages(
    ring: RingClient, make_session: MakeSession, assert_same_state: Callable[..., None]
) -> None:
    session = make_session(ring)
    session.advance(200)
    assert ring.flush(WAIT_S)
    ring_recording = Recording.open(ring.folder, origin_ns=ring.origin_ns)
    assert list(ring_recording.frames()) == session.frames
    assert_same_state(whole_state(ring), session.mirror_at(session.times_ns[-1]))
    assert is_held(ring.folder)
    ring.close()
    assert not ring.folder.exists()
    assert not ring.failure


def test_pending_messages_are_held_as_bytes_only(ring: RingClient, make_session: MakeSession) -> None:
    """Decoded messages waiting for a slow disk would take more than twice the memory."""
    session = make_session(ring)
    session.advance(1)
    assert ring.flush(WAIT_S)
    frame = session.frames[-1]
    num_held = sys.getrefcount(frame)
    assert ring.write(frame, encode(frame))
    assert sys.getrefcount(frame) == num_held


def test_ring_status_is_current_after_a_flush(ring: RingClient, make_session: MakeSession) -> None:
    session = make_session(ring)
    session.advance(200)
    assert ring.flush(WAIT_S)
    assert (ring.origin_ns, ring.start_ns, ring.end_ns) == (
        session.times_ns[0],
        session.times_ns[0],
        session.times_ns[-1],
    )
    assert ring.num_bytes > 1000
    assert ring.num_dropped == 0
    overview = ring.drain_overview()
    summaries = [item for item in overview if isinstance(item, Summary)]
    seconds = [summary.time_ns for summary in summaries]
    assert seconds == sorted(seconds)
    assert len(seconds) >= 3
    assert any(isinstance(item, TimedEvent) for item in overview)
    assert ring.drain_overview() == []


def test_bookmarks_texts_and_bounds_reach_the_ring_process(ring: RingClient, make_session: MakeSession) -> None:
    session = make_session(ring)
    session.advance(60)
    mark = new_bookmark(session.times_ns[-1], "here")
    assert ring.add_bookmark(mark)
    text = RecordedText(time_ns=session.times_ns[-1], epoch=1, block=3, owner=1, token_ids=(1, 2), text="hé")
    assert ring.write_texts([text])
    ring.set_bounds(max_bytes=1 << 20, max_seconds=60.0)
    assert (ring.bounds.max_bytes, ring.bounds.max_seconds) == (1 << 20, 60.0)
    assert ring.flush(WAIT_S)
    ring_recording = Recording.open(ring.folder, origin_ns=ring.origin_ns)
    assert list(ring_recording.bookmarks()) == [mark]
    assert list(ring_recording.texts()) == [text]


def test_narrower_time_limit_deletes_the_oldest_recent_history(tmp_path: Path, make_session: MakeSession) -> None:
    ring = RingClient(tmp_path / "ring")
    session = make_session(ring)
    ring.set_bounds(max_bytes=1 << 30, max_seconds=2.0)
    assert ring.flush(WAIT_S)
    session.advance(400)
    assert ring.flush(WAIT_S)
    assert ring.start_ns is not None
    assert ring.start_ns > session.times_ns[0]
    assert ring.origin_ns == session.times_ns[0]
    ring.close()


def test_kept_ring_holds_all_messages_after_close(tmp_path: Path, make_session: MakeSession) -> None:
    ring = RingClient(tmp_path / "ring")
    session = make_session(ring)
    session.advance(100)
    ring.close(keep=True)
    ring.close()
    assert not is_held(ring.folder)
    assert list(Recording.open(ring.folder).frames()) == session.frames


@pytest.mark.parametrize("bounds", [{"max_bytes": 0}, {"max_seconds": 0.0}])
def test_recent_history_process_with_invalid_limits_is_refused(tmp_path: Path, bounds: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        RingClient(tmp_path / "ring", **bounds)


def test_unsuitable_folder_is_reported_by_the_recent_history_process(tmp_path: Path, make_session: MakeSession) -> None:
    (tmp_path / "file").write_text("x")
    ring = RingClient(tmp_path / "file")
    wait_until(lambda: ring.failure)
    assert "is a file: give a folder" in ring.failure
    assert not ring.write(make_frame(make_session))
    assert not ring.add_bookmark(new_bookmark(1))
    assert not ring.flush(WAIT_S)
    ring.close()
    assert (tmp_path / "file").read_text() == "x"


def test_folder_of_another_ring_is_left_alone(tmp_path: Path) -> None:
    folder = RingFolder(tmp_path / "ring")
    ring = RingClient(tmp_path / "ring")
    wait_until(lambda: ring.failure)
    assert "another process is writing to it" in ring.failure
    ring.close()
    assert (tmp_path / "ring" / "lock").exists()
    folder.delete()


@needs_unix
def test_killed_ring_process_is_reported_and_its_data_stays(tmp_path: Path, make_session: MakeSession) -> None:
    ring = RingClient(tmp_path / "ring")
    session = make_session(ring)
    session.advance(50)
    assert ring.flush(WAIT_S)
    os.kill(ring.pid, signal.SIGKILL)
    wait_until(lambda: ring.failure)
    assert "the process that writes it stopped" in ring.failure
    assert not ring.write(session.engine.advance(), wait=True)
    assert not ring.flush(WAIT_S)
    assert list(Recording.open(ring.folder).frames()) == session.frames
    ring.close()
    assert not ring.folder.exists()


def test_full_disk_is_reported_and_the_ring_can_still_be_closed(tmp_path: Path, make_session: MakeSession) -> None:
    ring = RingClient(tmp_path / "ring")
    session = make_session(ring)
    session.advance(50)
    assert ring.flush(WAIT_S)
    assert not ring.pause
    resource = pytest.importorskip("resource")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.prlimit(ring.pid, resource.RLIMIT_FSIZE, (1_000, hard))
    while not ring.pause:
        session.advance(50)
        ring.flush(WAIT_S)
    assert "File too large" in ring.pause
    assert not ring.failure
    session.advance(10)
    assert not ring.flush(WAIT_S)
    ring.close()
    assert not ring.folder.exists()


def test_ring_process_that_cannot_be_started_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope_telemetry.recordings.ring_client.COMMAND", (str(tmp_path / "none"),))
    ring = RingClient(tmp_path / "ring")
    assert "cannot be started: No such file or directory" in ring.failure
    assert ring.pid == 0
    assert not ring.flush(WAIT_S)
    ring.close()


def test_ring_closed_immediately_leaves_nothing(tmp_path: Path) -> None:
    RingClient(tmp_path / "ring").close()
    assert not (tmp_path / "ring").exists()


SESSION = """
import os, signal, sys, time
from tests.simulated_engine.engine import SimulatedEngine
from kvscope_telemetry.recordings import ring_client
from kvscope_telemetry.recordings.ring_client import RingClient
ring = RingClient(sys.argv[1])
engine = SimulatedEngine(num_blocks=300)
ring.write(engine.snapshot())
assert ring.flush(100.0)
for _ in range(100):
    assert ring.write(engine.advance())
while ring._queue._messages:
    time.sleep(0.01)
print(ring.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_unix
def test_recent_history_of_a_killed_session_contains_what_it_had_sent(tmp_path: Path) -> None:
    """A killed session cannot say goodbye; its ring has what it had sent, and is unlocked."""
    done = subprocess.run(
        [sys.executable, "-c", SESSION, str(tmp_path / "ring")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not is_held(tmp_path / "ring"))
    assert segments_in(tmp_path / "ring")
    seqs = [frame.seq for frame in Recording.open(tmp_path / "ring").frames()]
    assert seqs == list(range(1, len(seqs) + 1))


@needs_unix
@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_all_parts_are_written_despite_short_writes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    got = bytearray()

    def writev(_: int, parts: list[bytes]) -> int:
        taken = b"".join(parts)[:most]
        got.extend(taken)
        return len(taken)

    monkeypatch.setattr(os, "writev", writev)
    parts = [bytes([number % 251]) * (number % 5) for number in range(2000)]
    ring_client._write_all(1, parts)
    assert bytes(got) == b"".join(parts)


def test_packets_of_the_recent_history_process_are_read_wherever_they_are_split() -> None:
    statuses = [RingStatus(num_bytes=number, failure="x" * number) for number in range(5)]
    stream = b"".join(packet(PacketKind.STATUS, encoded(each)) for each in statuses) + packet(PacketKind.MESSAGE, b"")
    for size in (1, 3, 10, len(stream)):
        reader = PacketReader()
        cut = [stream[start : start + size] for start in range(0, len(stream), size)]
        found = [each for data in cut for each in reader.feed(data)]
        assert [decode_status(body) for kind, body in found if kind is PacketKind.STATUS] == statuses
        assert found[-1] == (PacketKind.MESSAGE, b"")


def make_frame(make_session: MakeSession) -> Frame:
    class Nowhere:
        def write(self, *_: object, **__: object) -> bool:
            return True

    session = make_session(Nowhere())
    session.advance(1)
    frame: Frame = session.frames[0]
    return frame
