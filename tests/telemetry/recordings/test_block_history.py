"""The history of a block equals the mirror's row at every frame, however it is read."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.ledger import LASTING
from kvscope_telemetry.messages.telemetry import DeltaCheckpoint, Frame, Heartbeat, Hello
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.recordings.block_history import (
    BlockHistoryPart,
    GrowingBlockHistory,
    concatenate_parts,
    history_part,
    read_part,
)
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.read_budget import OpeningCancelled
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.block_changes import BlockChanges, ChangeKind, Moved
from kvscope_telemetry.summaries.block_moments import MomentKind

BLOCK_SIZE = 16
LONG_NS = 1 << 60


def row_of(mirror: Mirror, block: int) -> tuple[int, ...]:
    return tuple(int(getattr(mirror.ledger, name)[block]) for name in LASTING)


def row_at(part: BlockHistoryPart, time_ns: int) -> tuple[int, ...] | None:
    """Return the row of a moment, or None if it is unknown."""
    place = int(np.searchsorted(part.rows["time_ns"], time_ns, "right")) - 1
    if place < 0 or part.rows["how"][place] == ChangeKind.LOST:
        return None
    return tuple(int(part.rows[name][place]) for name in LASTING)


def mirrored_rows(recording: Recording, blocks: list[int]) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Return the time of each frame and the mirror's rows of `blocks` after it."""
    follower, seen = Follower(), []
    for seconds, message in recording.messages(keyframes=True):
        follower.feed(message)
        follower.apply_pending()
        if isinstance(message, Frame) and not follower.is_lost:
            rows = [row_of(follower.mirror, block) for block in blocks]
            seen.append((recording.start_ns + round(seconds * 1e9), rows))
    return seen


def busy_blocks(frames: list[Frame], count: int) -> list[int]:
    ids = np.concatenate([np.frombuffer(frame.blocks.ids, "<u4") for frame in frames])
    found, num = np.unique(ids, return_counts=True)
    return [*found[np.argsort(num)[-count // 2 :]].tolist(), *random.Random(3).sample(range(400), count // 2)]


@pytest.mark.parametrize("interval_ns", [1_000_000_000, LONG_NS])
def test_block_history_equals_the_mirror_at_every_frame(
    record: Callable[..., Any], interval_ns: int, storm: Callable[[int, int], int]
) -> None:
    recorded = record(500, keyframe_interval_ns=interval_ns)
    recording = Recording.open(recorded.path)
    blocks = busy_blocks(recorded.frames, storm(4, 16))
    expected = mirrored_rows(recording, blocks)
    for place, block in enumerate(blocks):
        whole = read_part(recording, block, recording.start_ns, recording.end_ns, BLOCK_SIZE)
        third = (recording.end_ns - recording.start_ns) // 3
        cuts = [recording.start_ns, recording.start_ns + third, recording.end_ns - third, recording.end_ns]
        parts = [read_part(recording, block, a, b, BLOCK_SIZE) for a, b in pairwise(cuts)]
        pieced = concatenate_parts(concatenate_parts(parts[0], parts[1]), parts[2])
        for part in (whole, pieced, concatenate_parts(parts[0], concatenate_parts(parts[1], parts[2]))):
            assert all(row_at(part, time_ns) == rows[place] for time_ns, rows in expected)
        assert np.array_equal(pieced.rows, whole.rows)
        assert pieced.moments == whole.moments
    assert len(expected) == 500


def test_live_block_history_equals_the_mirror(make_messages: Callable[..., Any]) -> None:
    _, snapshot, *frames = make_messages(400)
    blocks = busy_blocks(frames, 8)
    mirror = Mirror()
    mirror.reset(snapshot)
    block_histories = [BlockChanges(block) for block in blocks]
    for block_history in block_histories:
        block_history.add_known(mirror.ledger, snapshot.time_ns, 1, snapshot.step)
    rng = random.Random(1)
    while frames:
        count = rng.randint(1, 6)
        update = coalesce(frames[:count])
        del frames[:count]
        mirror.apply(update)
        for block_history in block_histories:
            block_history.add_update(update, 5)
            last = block_history.rows[-1]
            assert tuple(int(last[name]) for name in LASTING) == row_of(mirror, block_history.block)
            assert last["time_ns"] <= mirror.time_ns + 5
    assert all((np.diff(block_history.rows["time_ns"]) >= 0).all() for block_history in block_histories)


def test_block_history_is_unknown_within_a_gap(record: Callable[..., Any], make_messages: Callable[..., Any]) -> None:
    messages = make_messages(400)
    cut = [m for m in messages if not (isinstance(m, Frame) and 150 <= m.seq <= 160)]
    recorded = record(cut, keyframe_interval_ns=LONG_NS)
    recording = Recording.open(recorded.path)
    block = busy_blocks(recorded.frames, 2)[0]
    part = read_part(recording, block, recording.start_ns, recording.end_ns, BLOCK_SIZE)
    assert part.rows["how"][-1] == ChangeKind.LOST
    assert part.moments[-1].kind is MomentKind.LOST
    other = record([*cut, *make_messages(200, epoch=2, seed=5)], "two.mcap", keyframe_interval_ns=LONG_NS)
    recording = Recording.open(other.path)
    part = read_part(recording, block, recording.start_ns, recording.end_ns, BLOCK_SIZE)
    expected = mirrored_rows(recording, [block])
    assert all(row_at(part, time_ns) == rows[0] for time_ns, rows in expected)
    assert {1, 2} == set(part.rows["epoch"].tolist())


def test_block_history_joined_from_separate_parts_is_unknown_between_them(record: Callable[..., Any]) -> None:
    recording = Recording.open(record(400).path)
    begin, end = recording.start_ns, recording.end_ns
    second = 1_000_000_000
    parts = [read_part(recording, 5, a, b, BLOCK_SIZE) for a, b in ((begin, begin + second), (end - second, end))]
    whole = concatenate_parts(*parts)
    assert row_at(whole, begin + second // 2) is not None
    assert row_at(whole, begin + 3 * second) is None
    assert row_at(whole, end) == row_of(recording.state_at(1e9), 5)


def test_frame_overtaken_by_a_heartbeat_is_not_missed(
    record: Callable[..., Any], make_messages: Callable[..., Any]
) -> None:
    """A heartbeat is stamped on another thread: the next frame has an earlier engine time but is later in the file."""
    messages = make_messages(400)
    last = messages[300]
    assert isinstance(last, Frame)
    late = Heartbeat(epoch=1, time_ns=last.time_ns + 50_000_000, seq=last.seq, step=last.step)
    recording = Recording.open(record([*messages[:300], late, *messages[300:]]).path)
    follower = Follower()
    for message in messages[:301]:
        follower.feed(message)
    follower.apply_pending()
    hello = messages[0]
    assert isinstance(hello, Hello)
    until_ns = last.time_ns + hello.wall_time_ns - hello.time_ns
    block = int(follower.mirror.ledger.last_used_step.argmax())
    cut = read_part(recording, block, recording.start_ns, until_ns, BLOCK_SIZE)
    whole = read_part(recording, block, recording.start_ns, until_ns, BLOCK_SIZE, last=(1, last.seq))
    assert row_at(cut, until_ns) != row_of(follower.mirror, block)
    assert row_at(whole, until_ns) == row_of(follower.mirror, block)
    assert whole.rows["time_ns"][-1] <= until_ns == whole.end_ns


def test_reading_a_block_history_can_be_cancelled(record: Callable[..., Any]) -> None:
    recording = Recording.open(record(300).path)
    with pytest.raises(OpeningCancelled):
        read_part(recording, 5, recording.start_ns, recording.end_ns, BLOCK_SIZE, lambda share: share < 0.3)


def test_live_block_history_keeps_only_the_newest_rows(make_messages: Callable[..., Any]) -> None:
    _, snapshot, *frames = make_messages(600)
    block = busy_blocks(frames, 2)[0]
    short, long = BlockChanges(block, max_rows=16), BlockChanges(block)
    for message in (snapshot, *frames):
        for block_history in (short, long):
            block_history.feed(message, message.time_ns)
    assert len(short.rows) <= 16 < len(long.rows)
    assert short.num_forgotten == len(long.rows) - len(short.rows)
    kept = long.rows[-len(short.rows) :]
    assert all(np.array_equal(short.rows[name], kept[name]) for name in LASTING)
    part = history_part(short, 0, 1 << 60, BLOCK_SIZE)
    assert part.begin_ns == short.rows["time_ns"][0] > 0


def test_block_outside_the_pool_has_no_history(record: Callable[..., Any]) -> None:
    recording = Recording.open(record(60).path)
    part = read_part(recording, 4_000, recording.start_ns, recording.end_ns, BLOCK_SIZE)
    assert not part.rows.size
    assert part.moments == ()


def test_moves_are_part_of_the_block_history() -> None:
    engine = SimulatedEngine(num_blocks=120, num_running=8, num_host_blocks=40, num_disk_blocks=40, seed=2)
    snapshot, frames = engine.snapshot(), [engine.advance() for _ in range(600)]
    evicted = {int(i) for frame in frames for i in np.frombuffer(frame.moves.evicted, "<u4")}
    assert evicted
    block = min(evicted)
    block_history = BlockChanges(block)
    for message in (snapshot, *frames):
        block_history.feed(message, message.time_ns)
    times_ns = [f.time_ns for f in frames if block in np.frombuffer(f.moves.evicted, "<u4")]
    is_evicted = (block_history.rows["moved"] & Moved.EVICTED) != 0
    assert block_history.rows["time_ns"][is_evicted].tolist() == times_ns
    kinds = [moment.kind for moment in history_part(block_history, 0, 1, BLOCK_SIZE).moments]
    assert kinds.count(MomentKind.EVICTED) >= len(times_ns)


def test_growing_block_history_equals_one_read_at_once(make_messages: Callable[..., Any]) -> None:
    _, snapshot, *frames = make_messages(400)
    block = busy_blocks(frames, 2)[0]
    growing = GrowingBlockHistory(block, BLOCK_SIZE)
    growing.block_history.feed(snapshot, snapshot.time_ns)
    for frame in frames:
        growing.block_history.feed(frame, frame.time_ns)
        if growing.has_news:
            part = growing.part(0, frame.time_ns)
            assert not growing.has_news
    at_once = history_part(growing.block_history, 0, frames[-1].time_ns, BLOCK_SIZE)
    assert part.moments == at_once.moments
    assert part.block_moments.times_ns.tolist() == [moment.time_ns for moment in at_once.moments]


def test_block_history_is_the_same_from_any_start(
    record: Callable[..., Any], make_messages: Callable[..., Any]
) -> None:
    """Batches without a change of the block are skipped; the starts lie within such batches and near snapshots."""
    messages = make_messages(600)
    follower, seen = Follower(), []
    for place, message in enumerate(messages):
        follower.feed(message)
        seen.append(message)
        if place in (150, 151, 320):  # an answer to a request: it precedes frames whose effect it contains
            follower.apply_pending()
            seen.insert(-2, snapshot_of(follower.mirror))
    recording = Recording.open(record(seen, keyframe_interval_ns=LONG_NS).path)
    frames = [message for message in messages if isinstance(message, Frame)]
    blocks = [*busy_blocks(frames, 2), 399]
    expected = mirrored_rows(recording, blocks)
    rng = random.Random(7)
    for place, block in enumerate(blocks):
        for _ in range(6):
            first, last = sorted(rng.sample(range(len(expected)), 2))
            from_ns, until_ns = expected[first][0], expected[last][0]
            part = read_part(recording, block, from_ns, until_ns, BLOCK_SIZE)
            assert ChangeKind.LOST not in part.rows["how"]
            assert all(row_at(part, time_ns) == rows[place] for time_ns, rows in expected[first : last + 1])


def test_block_history_skips_frame_batches_that_do_not_contain_the_block(record: Callable[..., Any]) -> None:
    recording = Recording.open(record(600).path)
    begin, end = recording.start_ns, recording.end_ns
    seq, num_checkpoints = 0, 0
    for _, message in recording.messages_about(1 << 20, begin, end):
        if isinstance(message, DeltaCheckpoint):
            assert message.since_seq == seq
            assert not message.blocks.ids
            seq, num_checkpoints = message.seq, num_checkpoints + 1
    assert seq == 600
    assert 0 < num_checkpoints < 60, "a batch of frames each"
    assert len(list(recording.frames(0.0, recording.info.duration_s))) == 600
