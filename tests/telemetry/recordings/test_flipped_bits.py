"""A single flipped bit in a recording of eight seconds: it opens, and loses at most the seconds around the bit.

Tested for a recording, a part saved from a ring, a recovered file, a ring, and the file of a killed process. With
`KVSCOPE_STORMS` set each gets 300 flips; the seed is printed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring import Ring
from kvscope_telemetry.recordings.ring_folder import segments_in
from kvscope_telemetry.recordings.save import save
from kvscope_telemetry.recordings.writer import RecordingWriter

SECONDS, RATE = 8, 100
SEED = 20
SPARED_BYTES = 64
"""Bytes at both ends that are not flipped: the magic numbers and the MCAP header."""


def write_seconds(into: RecordingWriter | Ring) -> None:
    now_ns = 1_000_000_000
    engine = SimulatedEngine(num_blocks=600, num_running=8, clock=lambda: now_ns)
    into.write(engine.snapshot(), wait=True)
    for step in range(SECONDS * RATE):
        now_ns += 1_000_000_000 // RATE
        into.write(engine.advance(), wait=True)
        engine.outputs.clear()
        if step % RATE == 0:
            into.write(engine.heartbeat(), wait=True)


def written_recording(folder: Path) -> Path:
    with RecordingWriter(folder / "written.mcap") as writer:
        write_seconds(writer)
    return writer.path


def ring_recording(folder: Path) -> Path:
    ring = Ring(folder / "ring")
    write_seconds(ring)
    ring.close(keep=True)
    (segment,) = segments_in(ring.folder).values()
    return segment


def saved_part(folder: Path) -> Path:
    segment = ring_recording(folder)
    save(Recording.open(segment.parent), folder / "saved.mcap", 1 / RATE)
    return folder / "saved.mcap"


def recovered_recording(folder: Path) -> Path:
    assert save(Recording.open(written_recording(folder)), folder / "recovered.mcap").num_frames == SECONDS * RATE
    return folder / "recovered.mcap"


def recording_of_a_killed_process(folder: Path) -> Path:
    with RecordingWriter(folder / "killed.mcap") as writer:
        write_seconds(writer)
        assert writer.flush(60.0)
        left = folder / "left.mcap.part"
        left.write_bytes(writer.part.read_bytes())
    return left


def flips(data: bytes, num_flips: int, choose: random.Random) -> Iterator[tuple[str, bytes]]:
    for _ in range(num_flips):
        at, bit = choose.randrange(SPARED_BYTES, len(data) - SPARED_BYTES), choose.randrange(8)
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        yield f"bit {bit} of byte {at} of {len(data)}, seed {SEED}", bytes(flipped)


def num_states(recording: Recording) -> int:
    """Return the number of frames after which a playback from the start knows the state."""
    follower, known = Follower(), set[int]()
    for _, message in recording.messages(keyframes=True):
        follower.feed(message)
        follower.apply_pending()
        if isinstance(message, Frame) and not follower.is_lost and follower.mirror.seq == message.seq:
            known.add(message.seq)
    return len(known)


@pytest.mark.parametrize(
    "write", [written_recording, ring_recording, saved_part, recovered_recording, recording_of_a_killed_process]
)
def test_flipped_bit_loses_at_most_the_seconds_around_it(
    write: Callable[[Path], Path], tmp_path: Path, storm: Callable[[int, int], int]
) -> None:
    path = write(tmp_path)
    whole = {frame.seq: frame for frame in Recording.open(path).frames()}
    assert len(whole) >= SECONDS * RATE - 1, "a saved part starts with the state after its first frame"
    flipped_path = tmp_path / f"flipped{''.join(path.suffixes)}"
    print(f"seed {SEED}")
    for where, data in flips(path.read_bytes(), storm(6 if write is written_recording else 2, 60), random.Random(SEED)):
        flipped_path.write_bytes(data)
        recording = Recording.open(flipped_path)
        frames = list(recording.frames())
        assert all(frame == whole[frame.seq] for frame in frames), where
        assert len(frames) >= 0.8 * len(whole), where
        assert num_states(recording) >= 0.7 * len(whole), where
        assert recording.state_at(recording.info.duration_s).seq >= max(whole) - RATE, where


@pytest.mark.parametrize("at_s", [2.0, 5.0])
def test_state_is_known_again_after_a_damaged_second(tmp_path: Path, at_s: float) -> None:
    path = written_recording(tmp_path)
    whole = Recording.open(path)
    at_ns = whole.start_ns + at_s * 1e9
    damaged = next(chunk for chunk in whole.segments[0].message_chunks if chunk.start_ns <= at_ns <= chunk.end_ns)
    data = bytearray(path.read_bytes())
    data[damaged.offset + damaged.stored_bytes // 2] ^= 1
    path.write_bytes(data)
    recording, follower = Recording.open(path), Follower()
    for _, message in recording.state_messages(at_s):
        follower.feed(message)
    for _, message in recording.messages(at_s, at_s + 3.0, keyframes=True):
        follower.feed(message)
    follower.apply_pending()
    assert not follower.is_lost
    assert follower.mirror.ledger.equals(whole.state_at(at_s + 3.0).ledger)
