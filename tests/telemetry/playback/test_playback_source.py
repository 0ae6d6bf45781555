"""Playing a recording: pace, ends, and that the mirror at any position is the recording's state there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import Heartbeat, MemoryBreakdown
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.playback.playback_reader import SPAN_NS
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.source import SourceState, Update

SameState = Callable[[Mirror, Mirror], None]
WAIT_S = 60.0
MS = 1_000_000


class ManualClock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns


class PlaybackWatcher:
    """Reads from a source like the desktop does."""

    def __init__(self, source: PlaybackSource, clock: ManualClock) -> None:
        self.source, self.clock = source, clock
        self.mirror = Mirror()
        self.updates: list[Update] = []
        self.num_jumps = 0

    def drain(self) -> Mirror:
        """Apply everything available once it belongs to the position."""
        assert self.source.wait(lambda: not self.source.is_seeking, WAIT_S)
        while (update := self.source.poll_update()) is not None:
            if self.source.has_jumped:
                self.mirror, self.updates = Mirror(), []
                self.num_jumps += 1
            self.mirror.apply(update)
            self.updates.append(update)
        return self.mirror

    def num_frames_due(self) -> int:
        """Number of frames up to the position."""
        return len(list(self.source.recording.frames(0.0, self.source.position)))

    def play_to_the_end(self) -> None:
        """Play to the end at maximum speed."""
        self.source.set_speed(1000.0)
        self.source.play()
        while self.source.is_playing:
            self.pass_ms(10)

    def seqs(self) -> list[int]:
        return [seq for update in self.updates if update.series for seq in update.series["seq"].tolist()]

    def pass_ms(self, milliseconds: int) -> None:
        """Advance the clock and wait until the source has noticed."""
        for _ in range(milliseconds // 10):
            expected_s = min(self.source.position + 0.01 * self.source.speed, self.source.duration)
            self.clock.now_ns += 10 * MS
            assert self.source.wait(lambda at=expected_s: abs(self.source.position - at) < 1e-6, WAIT_S)


@pytest.fixture
def watch() -> Iterator[Callable[..., PlaybackWatcher]]:
    """Function that opens a source at the start and its watcher: `watch(path)`."""
    opened: list[PlaybackSource] = []

    def make(path: Path, **options: bool) -> PlaybackWatcher:
        clock = ManualClock()
        opened.append(PlaybackSource(Recording.open(path), **{"is_playing": False, **options}, clock=clock))
        watcher = PlaybackWatcher(opened[-1], clock)
        watcher.drain()
        return watcher

    yield make
    for source in opened:
        source.close()
        source._thread.join(WAIT_S)  # close waits at most one second for the thread
        assert not source._thread.is_alive()


def test_playback_advances_at_the_recorded_pace_times_the_speed(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher], assert_same_state: SameState
) -> None:
    watcher = watch(record(300).path)
    source = watcher.source
    start = source.position
    assert watcher.mirror.seq == 0
    source.play()
    watcher.pass_ms(500)
    assert source.position == pytest.approx(start + 0.5)
    assert watcher.drain().seq == watcher.num_frames_due() > 0
    source.set_speed(4.0)
    watcher.pass_ms(500)
    assert source.position == pytest.approx(start + 2.5)
    assert watcher.drain().seq == watcher.num_frames_due() > 5
    source.set_speed(0.25)
    watcher.pass_ms(400)
    assert source.position == pytest.approx(start + 2.6)
    assert watcher.drain().seq == watcher.num_frames_due()
    assert watcher.seqs() == list(range(1, watcher.num_frames_due() + 1))
    assert_same_state(watcher.mirror, source.recording.state_at(source.position))


def test_paused_time_does_not_advance_the_position(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher]
) -> None:
    watcher = watch(record(100).path)
    source, start = watcher.source, watcher.source.position
    source.play()
    watcher.pass_ms(100)
    source.pause()
    assert (source.status.state, source.status.reason) == (SourceState.PLAYBACK, "paused")
    watcher.clock.now_ns += 10**12
    source.play()
    assert source.status.reason == ""
    watcher.pass_ms(100)
    assert source.position == pytest.approx(start + 0.2)
    assert watcher.drain().seq == watcher.num_frames_due() > 0


def test_playback_skips_no_frame_after_a_long_pause_between_polls(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher]
) -> None:
    watcher = watch(record(300).path)
    start = watcher.source.position
    watcher.source.play()
    watcher.clock.now_ns += 10**12
    assert watcher.source.wait(lambda: watcher.source.position > start, WAIT_S)
    assert watcher.source.position == pytest.approx(start + 0.1)
    assert watcher.drain().seq == watcher.num_frames_due()


def test_playback_stops_at_the_end_with_everything_applied(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher], assert_same_state: SameState
) -> None:
    recorded = record(150)
    watcher = watch(recorded.path)
    source = watcher.source
    watcher.play_to_the_end()
    assert source.position == source.duration
    assert source.status.reason == "at the end"
    assert_same_state(watcher.drain(), recorded.mirror_after(152))
    assert watcher.seqs() == list(range(1, 151))
    assert watcher.updates[0].snapshot is not None
    source.play()
    assert watcher.drain().seq == 0
    watcher.pass_ms(10)
    assert watcher.drain().seq == watcher.num_frames_due() > 0


@pytest.mark.parametrize("with_past", [True, False])
def test_seek_gives_the_state_there_and_playback_continues(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher], assert_same_state: SameState, with_past: bool
) -> None:
    watcher = watch(record(400).path)
    source, chance = watcher.source, random.Random(3)
    start, end = source.position, source.duration
    for seconds in [start, end, 1.0, 1.02, *(chance.uniform(start, end) for _ in range(20))]:
        before = watcher.num_jumps
        source.seek(seconds, with_past=with_past)
        assert source.position == pytest.approx(seconds)
        watcher.drain()
        assert watcher.num_jumps == before + 1
        assert watcher.updates[0].snapshot is not None
        assert_same_state(watcher.mirror, source.recording.state_at(seconds))
    source.seek(3.0)
    source.play()
    first = watcher.drain().seq
    watcher.pass_ms(100)
    last = watcher.drain().seq
    assert last == watcher.num_frames_due() > first
    assert watcher.seqs()[first - last :] == list(range(first + 1, last + 1))


def test_seeks_beyond_the_ends_go_to_the_ends(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher]
) -> None:
    """The start is the first snapshot; only a hello precedes it."""
    watcher = watch(record(100).path)
    start = watcher.source.position
    assert watcher.source.recording.state_at(start).hello is not None
    assert watcher.source.recording.state_at(start - 1e-6).hello is None
    watcher.source.seek(1e12)
    assert watcher.drain().seq == 100
    assert watcher.source.status.reason == "at the end"
    watcher.source.seek(-5.0)
    assert watcher.drain().seq == 0
    assert watcher.source.position == start


def test_last_of_many_seeks_wins(record: Callable[..., Any], watch: Callable[..., PlaybackWatcher]) -> None:
    watcher = watch(record(400).path)
    for index in range(100):
        watcher.source.seek(index * 7 % 8)
    watcher.source.seek(4.0)
    assert watcher.drain().seq == watcher.num_frames_due()


def test_playback_seek_delivers_the_earlier_frames_in_short_time_spans(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher]
) -> None:
    watcher = watch(record(400).path)
    watcher.source.seek(7.0)
    watcher.drain()
    assert watcher.seqs() == list(range(1, watcher.num_frames_due() + 1))
    for update in watcher.updates:
        times = update.series["time_ns"] if update.series else [0]
        assert times[-1] - times[0] <= SPAN_NS
    watcher.source.seek(7.0, with_past=False)
    watcher.drain()
    assert len(watcher.updates) == 1


def test_memory_breakdown_is_known_after_any_seek(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher], make_messages: Callable[..., Any]
) -> None:
    messages = make_messages(300)
    memory = MemoryBreakdown(epoch=1, time_ns=messages[0].time_ns, weights_bytes=7)
    path = record([messages[0], memory, *messages[1:]]).path
    source = PlaybackSource(Recording.open(path), is_playing=False)
    source.seek(5.0, with_past=False)  # before the start was read
    watcher = PlaybackWatcher(source, ManualClock())
    watcher.drain()
    source.close()
    assert watcher.updates[0].memory == memory


def test_epochs_are_played_in_order(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher], make_messages: Callable[..., Any]
) -> None:
    recorded = record(make_messages(60, epoch=1) + make_messages(70, epoch=2))
    watcher = watch(recorded.path)
    watcher.play_to_the_end()
    assert (watcher.drain().epoch, watcher.mirror.seq) == (2, 70)
    snapshots = [update.snapshot for update in watcher.updates if update.snapshot]
    assert [snapshot.hello.epoch for snapshot in snapshots] == [1, 2]
    assert watcher.seqs() == [*range(1, 61), *range(1, 71)]
    watcher.source.seek(0.5)
    assert (watcher.drain().epoch, watcher.mirror.seq) == (1, watcher.num_frames_due())


def test_heartbeats_are_synthesized_only_for_an_idle_simulation(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher], make_messages: Callable[..., Any]
) -> None:
    """A simulation may wait for its next request. A recorded engine sends its own heartbeats, or is gone."""
    messages = make_messages(10)
    with_heartbeat = [*messages, Heartbeat(epoch=1, time_ns=messages[-1].time_ns, seq=10, step=10)]
    late = make_messages(200)[-1]
    idle_s = (late.time_ns - messages[-1].time_ns) / 1e9
    for number, (given, expected) in enumerate(((messages, int(idle_s / 0.5)), (with_heartbeat, 1))):
        watcher = watch(record([*given, late], f"idle{number}.mcap").path)
        watcher.source.seek(watcher.source.duration - 0.001)
        watcher.drain()
        assert len([update for update in watcher.updates if update.heartbeat]) == expected


def test_truncated_recording_plays_to_its_last_whole_chunk(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher], assert_same_state: SameState, tmp_path: Path
) -> None:
    data = record(400).path.read_bytes()
    path = tmp_path / "cut.mcap"
    path.write_bytes(data[: len(data) * 7 // 10])
    watcher = watch(path)
    recording = watcher.source.recording
    assert not recording.info.is_complete
    watcher.source.seek(1e9)
    assert watcher.drain().seq == recording.info.num_frames > 100
    assert_same_state(watcher.mirror, recording.state_at(1e9))


def test_playback_continues_with_the_keyframe_after_a_damaged_chunk(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher], assert_same_state: SameState
) -> None:
    watcher = watch(record(400).path)
    source = watcher.source
    for chunk in source.recording.segments[0].message_chunks[4:6]:
        chunk.crc ^= 1
    watcher.play_to_the_end()
    assert_same_state(watcher.drain(), source.recording.state_at(1e9))
    assert len([update for update in watcher.updates if update.snapshot]) == 2
    assert len(watcher.seqs()) < 400


def test_playback_resumes_with_the_next_keyframe_after_an_update_was_refused(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher]
) -> None:
    watcher = watch(record(200).path)
    watcher.source.play()
    watcher.pass_ms(200)
    before = watcher.drain().seq
    watcher.source.resync()
    watcher.pass_ms(700)
    assert watcher.drain().seq == before
    watcher.pass_ms(300)
    assert watcher.drain().seq == watcher.num_frames_due()


def test_vanished_file_is_reported(record: Callable[..., Any], watch: Callable[..., PlaybackWatcher]) -> None:
    watcher = watch(record(100).path)
    watcher.source.recording.path.unlink()
    watcher.source.seek(1.0)
    assert watcher.source.wait(lambda: not watcher.source.is_seeking, WAIT_S)
    status = watcher.source.status
    assert status.state is SourceState.PLAYBACK
    assert status.reason.endswith("cannot be read: No such file or directory")


def test_playback_that_failed_ignores_seek_step_and_play(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher]
) -> None:
    source = watch(record(100).path).source
    source.recording.path.unlink()
    source.seek(1.0)
    assert source.wait(lambda: bool(source.failure), WAIT_S)
    for move in (lambda: source.seek(0.5), lambda: source.step(1), source.play):
        move()
        assert not source.is_seeking
        assert not source.is_playing
    assert source.failure.endswith("cannot be read: No such file or directory")


def test_recording_without_a_snapshot_has_no_state(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher]
) -> None:
    watcher = watch(record(record(1).messages[:1], "alone.mcap").path, is_playing=True)
    assert watcher.drain().hello is None
    assert watcher.source.duration == 0.0


@pytest.mark.parametrize("speed", [0.0, -1.0, 1e9, float("nan")])
def test_invalid_speed_is_refused_by_name(
    record: Callable[..., Any], watch: Callable[..., PlaybackWatcher], speed: float
) -> None:
    with pytest.raises(BadInput, match="is not accepted: must be a number from"):
        watch(record(5).path).source.set_speed(speed)
