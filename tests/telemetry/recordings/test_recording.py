"""Recordings round trip, and the state at any time is the mirror's at that time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mcap.reader
import msgspec
import pytest
from tests.simulated_engine.command import ROOT

from kvscope_telemetry import Recording
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.telemetry import Frame, Goodbye, Heartbeat, Hello, Progress, TelemetryMessage
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.recordings.frame_batch import FrameBatch
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.layout import FRAMES, KEYFRAMES, MESSAGES, TOPICS
from kvscope_telemetry.recordings.mcap_file import McapFile
from kvscope_telemetry.recordings.request_index import recorded_requests
from kvscope_telemetry.recordings.writer import RecordingWriter

SameState = Callable[[Mirror, Mirror], None]


def test_every_message_round_trips(record: Callable[..., Any], make_messages: Callable[..., Any]) -> None:
    messages = make_messages(300)
    epoch = messages[0].epoch
    messages.insert(0, Progress(stage="load"))
    messages[100:100] = [Heartbeat(epoch=epoch, time_ns=messages[100].time_ns, seq=97, step=97)]
    messages.append(Goodbye(epoch=epoch))
    recorded = record(messages)
    recording = Recording.open(recorded.path)
    assert [message for _, message in recording.messages()] == messages
    assert list(recording.frames()) == recorded.frames
    assert recording.num_damaged == 0
    info = recording.info
    assert (info.num_frames, info.epochs, info.is_complete) == (300, (epoch,), True)
    assert info.hello == messages[1]
    assert not Path(f"{recorded.path}.part").exists()


def test_hello_of_each_engine_start_is_in_the_channel_of_hellos(
    record: Callable[..., Any], make_messages: Callable[..., Any]
) -> None:
    """A client that attaches gets the hello inside of a snapshot, and each snapshot after a gap repeats it."""
    snapshot, *frames = make_messages(20)[1:]
    repeated = msgspec.structs.replace(snapshot, seq=frames[9].seq)
    hello = msgspec.structs.replace(snapshot.hello, epoch=snapshot.hello.epoch + 1)
    second = msgspec.structs.replace(snapshot, hello=hello, time_ns=frames[-1].time_ns)
    path = record([snapshot, *frames[:10], repeated, *frames[10:], second]).path
    with path.open("rb") as file:
        found = [
            msgspec.msgpack.decode(message.data)
            for _, _, message in mcap.reader.make_reader(file).iter_messages(topics=["/kvscope/hellos"])
        ]
    assert [each["epoch"] for each in found] == [snapshot.hello.epoch, hello.epoch]
    assert found[0]["model"]["name"] == hello.model.name
    assert found[0]["wall_time_ns"] == hello.wall_time_ns


@pytest.mark.parametrize("missing", [1, 7, 8, 9])
def test_file_without_its_last_bytes_is_truncated(record: Callable[..., Any], missing: int) -> None:
    path = record(20).path
    path.write_bytes(path.read_bytes()[:-missing])
    recording = Recording.open(path)
    assert not recording.info.is_complete
    assert recording.damage_summary == "truncated; recovered to the last complete chunk"
    assert recording.info.num_frames == 20


def test_reading_a_time_range_of_a_recording_returns_exactly_its_frames(record: Callable[..., Any]) -> None:
    recording = Recording.open(record(300).path)
    times = [seconds for seconds, message in recording.messages() if isinstance(message, Frame)]
    assert recording.info.duration_s == times[-1]
    for low, high in ((0, 299), (17, 17), (100, 250), (299, 299)):
        seqs = [frame.seq for frame in recording.frames(times[low], times[high])]
        assert seqs == list(range(low + 1, high + 2))
    assert list(recording.frames(times[-1] + 1)) == []


def test_state_at_any_time_equals_the_mirror(record: Callable[..., Any], assert_same_state: SameState) -> None:
    recorded = record(400)
    recording = Recording.open(recorded.path)
    times = [seconds for seconds, message in recording.messages() if isinstance(message, Frame)]
    for index in (0, 1, 49, 50, 51, 170, 398, 399):
        assert_same_state(recording.state_at(times[index]), recorded.mirror_after(index + 3))
    assert_same_state(recording.state_at(times[9] + 0.001), recorded.mirror_after(12))
    assert_same_state(recording.state_at(1e9), recorded.mirror_after(402))
    assert recording.state_at(0).seq == 0


def test_seek_starts_at_a_keyframe(record: Callable[..., Any]) -> None:
    """Frames before the last keyframe are not needed: they may even be damaged."""
    recorded = record(400)
    with recorded.path.open("rb") as file:
        reader = mcap.reader.make_reader(file)
        keyframes = [message.log_time for _, _, message in reader.iter_messages(topics=[TOPICS[KEYFRAMES]])]
    recording = Recording.open(recorded.path)
    assert 0.9 * recording.info.duration_s - 1 <= len(keyframes)
    assert all(later - earlier >= 1_000_000_000 for earlier, later in pairwise(keyframes))
    at_end = recording.state_at(1e9)
    next(chunk for chunk in recording.segments[0].message_chunks if chunk.num_frames).crc ^= 1
    assert recording.state_at(1e9).ledger.equals(at_end.ledger)
    assert recording.num_damaged == 0
    assert list(recording.frames())[-1].seq == 400
    assert recording.num_damaged == 1


def test_official_mcap_reader_reads_the_recording(record: Callable[..., Any]) -> None:
    recorded = record(50)
    with recorded.path.open("rb") as file:
        reader = mcap.reader.make_reader(file, validate_crcs=True)
        assert reader.get_header().profile == "kvscope/2"
        found = list(reader.iter_messages(topics=[TOPICS[FRAMES]]))
    assert {schema.name for schema, _, _ in found} == {"kvscope.Columns"}
    frames = [frame for _, _, message in found for _, frame in FrameBatch(message.data).frames()]
    assert frames == recorded.frames


def test_recording_keeps_the_bytes_of_a_message_with_unknown_fields(record: Callable[..., Any], tmp_path: Path) -> None:
    """A newer engine may send more fields than this version knows."""
    hello, snapshot, frame = record(1).messages
    data = msgspec.msgpack.encode({**msgspec.msgpack.decode(encode(frame)), "new": 1})
    with RecordingWriter(tmp_path / "raw.mcap") as writer:
        for message in (hello, snapshot):
            writer.write(message)
        writer.write(frame, data)
    with (tmp_path / "raw.mcap").open("rb") as file:
        messages = mcap.reader.make_reader(file).iter_messages(topics=[TOPICS[MESSAGES]])
        assert [message.data for _, _, message in messages] == [data]
    assert list(Recording.open(tmp_path / "raw.mcap").frames()) == [frame]


def test_recording_of_two_engine_starts_has_the_right_state_in_both(
    record: Callable[..., Any], make_messages: Callable[..., Any], assert_same_state: SameState
) -> None:
    first, second = make_messages(120, epoch=7), make_messages(90, epoch=8, num_blocks=99, seed=3)
    recorded = record(first + second)
    recording = Recording.open(recorded.path)
    assert recording.info.epochs == (7, 8)
    assert recording.info.num_frames == 210
    times = [seconds for seconds, message in recording.messages() if isinstance(message, Frame)]
    assert times == sorted(times)
    assert_same_state(recording.state_at(times[100]), recorded.mirror_after(103))
    assert_same_state(recording.state_at(times[-1]), recorded.mirror_after(214))


def test_state_after_missing_frames_waits_for_a_snapshot(
    record: Callable[..., Any], make_messages: Callable[..., Any]
) -> None:
    messages = make_messages(200)
    del messages[80:90]
    recorded = record(messages)
    recording = Recording.open(recorded.path)
    assert recording.state_at(1e9).seq == messages[79].seq
    assert recording.info.num_frames == 190
    again = record([*messages, snapshot_of(recorded.mirror_after(80))], "again.mcap")
    assert Recording.open(again.path).state_at(1e9).seq == messages[79].seq


def test_recording_writer_counts_messages_dropped_because_its_queue_is_full(
    tmp_path: Path, make_messages: Callable[..., Any]
) -> None:
    messages = make_messages(400)
    with RecordingWriter(tmp_path / "full.mcap", max_queued_bytes=1) as writer:
        taken = [writer.write(message) for message in messages]
    assert writer.num_dropped == taken.count(False)
    assert writer.num_written == taken.count(True) >= 1


def test_full_disk_ends_the_recording_and_keeps_what_was_written(
    tmp_path: Path, make_messages: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, add = make_messages(300), McapFile.add_message

    def full(file: McapFile, *message: Any) -> None:
        if writer.num_written == 150:
            file.flush()
            raise OSError(28, "No space left on device")
        add(file, *message)

    monkeypatch.setattr(McapFile, "add_message", full)
    writer = RecordingWriter(tmp_path / "full.mcap")
    for message in messages:
        writer.write(message, wait=True)
    with pytest.raises(
        KvscopeError, match=r"stopped early: No space left on device; what came before is in full\.mcap"
    ):
        writer.close()
    assert writer.num_written + writer.num_dropped == len(messages)
    assert not writer.write(messages[2])
    recording = Recording.open(tmp_path / "full.mcap")
    assert recording.info.num_frames == 148
    assert recording.info.is_complete
    with (tmp_path / "full.mcap").open("rb") as file:  # another program's reader
        reader = mcap.reader.make_reader(file)
        batches = [message.data for _, _, message in reader.iter_messages(topics=[TOPICS[FRAMES]])]
        assert sum(FrameBatch(data).num_frames for data in batches) == 148


def test_killed_process_leaves_what_was_flushed(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from kvscope_telemetry.recordings import writer\n"
        "from tests.simulated_engine.engine import SimulatedEngine\n"
        "writer.FLUSH_S = 0.01\n"
        "recording = writer.RecordingWriter(sys.argv[1])\n"
        "engine = SimulatedEngine(num_blocks=100)\n"
        "recording.write(engine.hello)\n"
        "recording.write(engine.snapshot())\n"
        "while os.path.getsize(sys.argv[1] + '.part') < 20_000:\n"
        "    recording.write(engine.advance(), wait=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "killed.mcap"
    assert subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT).returncode == -9
    recording = Recording.open(f"{path}.part")
    seqs = [frame.seq for frame in recording.frames()]
    assert seqs == list(range(1, len(seqs) + 1))
    assert recording.state_at(1e9).seq == len(seqs) == recording.info.num_frames > 0


def test_existing_file_is_not_overwritten(record: Callable[..., Any], tmp_path: Path) -> None:
    path = record(5).path
    with pytest.raises(BadInput, match=r"session\.mcap' already exists"):
        RecordingWriter(path)
    Path(tmp_path / "other.mcap.part").touch()
    with pytest.raises(BadInput, match=r"other\.mcap\.part' already exists"):
        RecordingWriter(tmp_path / "other.mcap")
    with pytest.raises(BadInput, match=r"name ends in \.mcap"):
        RecordingWriter(tmp_path / "session.rrd")
    with pytest.raises(BadInput, match=r"cannot be written: No such file"):
        RecordingWriter(tmp_path / "nowhere" / "session.mcap")


def test_importing_the_library_does_not_import_mcap() -> None:
    program = "import sys, kvscope_telemetry; print({'mcap', 'zstandard', 'lz4'} & set(sys.modules) or 'light')"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "light\n"


def test_hello_alone_is_a_recording_without_blocks(record: Callable[..., Any]) -> None:
    hello = record(1).messages[0]
    assert isinstance(hello, Hello)
    messages: list[TelemetryMessage] = [hello]
    recording = Recording.open(record(messages, "alone.mcap").path)
    assert (recording.info.num_frames, recording.info.duration_s) == (0, 0.0)
    assert recording.state_at(0).num_blocks == 0
    assert recorded_requests(recording) == []
