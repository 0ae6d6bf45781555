"""Messages stored as columns: lossless, and much smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.ledger import COLUMNS, DENSE, MEASURED, BlockRows, packing_of
from kvscope_telemetry.messages.telemetry import Frame, Moves, RequestRows, Snapshot, Work
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.recordings.columns import Columns, pack
from kvscope_telemetry.recordings.frame_batch import FrameBatch, pack_frames


def advanced(num_frames: int, **options: Any) -> tuple[SimulatedEngine, list[Frame]]:
    engine = SimulatedEngine(**{"num_blocks": 300, "num_running": 8, **options})
    return engine, [engine.advance() for _ in range(num_frames)]


@pytest.mark.parametrize("lower", [0, 60])
def test_frames_and_snapshots_round_trip(lower: int) -> None:
    engine, frames = advanced(400, num_host_blocks=lower, num_disk_blocks=lower)
    for first, last in ((0, 400), (7, 8), (100, 280)):
        assert Columns(pack(frames[first:last])).records(Frame) == frames[first:last]
    assert Columns(pack(frames)).records(Frame, [3, 90, 91]) == [frames[3], frames[90], frames[91]]
    snapshot = engine.snapshot()
    assert Columns(pack([snapshot])).records(Snapshot) == [snapshot]


numbers = st.integers(0, 3)


@st.composite
def random_block_rows(draw: st.DrawFn) -> BlockRows:
    """Rows as a ledger packs them: parents and measured columns only where they are not all 0."""
    count = draw(st.integers(0, 5))
    columns = {
        name: np.array(draw(st.lists(numbers, min_size=count, max_size=count)), COLUMNS[name])
        for name in (*DENSE, "parent", *MEASURED)
    }
    ids = np.array(draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)), "<u4")
    columns["parent"] = columns["parent"][columns["hash"] != 0]
    packed = {name: column.tobytes() if name in DENSE or column.any() else b"" for name, column in columns.items()}
    return BlockRows(ids=ids.tobytes(), **packed)


@st.composite
def random_frame(draw: st.DrawFn) -> Frame:
    moved = np.array(draw(st.lists(st.integers(0, 2**32 - 1), max_size=3)), "<u4").tobytes()
    tables = np.array(draw(st.lists(numbers, min_size=2, max_size=2)), "<u4")
    drafts = np.array(draw(st.lists(numbers, min_size=2, max_size=2)), "<u4")
    pair, zeros = np.arange(2, dtype="<u4").tobytes(), bytes(8)
    requests = RequestRows(
        number=pair,
        state=b"\1\2",
        num_computed_tokens=zeros,
        num_cached_tokens=pair,
        num_output_tokens=zeros,
        num_preemptions=b"\0\1\2\3",
        table_start=zeros,
        table_count=tables.tobytes(),
        table_blocks=np.zeros(tables.sum(), "<u4").tobytes(),
        num_draft_tokens=drafts.tobytes() if drafts.any() else b"",
    )
    return Frame(
        epoch=draw(st.integers(0, 2**63 - 1)),
        seq=draw(st.integers(1, 2**63 - 1)),
        step=draw(st.integers(0, 2**33)),
        time_ns=draw(st.integers(0, 2**63 - 1)),
        blocks=draw(random_block_rows()),
        requests=draw(st.sampled_from([RequestRows(), requests])),
        moves=Moves(evicted=moved),
        work=Work(flops=draw(st.integers(0, 2**62))),
        first_token_ns=np.array([draw(st.integers(0, 2**64 - 1))], "<u8").tobytes(),
    )


@given(st.lists(random_frame(), min_size=1, max_size=6))
def test_random_frames_round_trip(frames: list[Frame]) -> None:
    assert Columns(pack(frames)).records(Frame) == frames


def test_merged_batch_has_the_effect_of_its_frames(record: Callable[..., Any]) -> None:
    engine = SimulatedEngine(num_blocks=300, num_running=8)
    snapshot, frames = engine.snapshot(), [engine.advance() for _ in range(180)]
    one, other = Follower(), Follower()
    for follower, messages in ((one, frames), (other, [_batch(frames).joined(None)[0][1]])):  # type: ignore[index]
        for message in (snapshot, *messages):
            follower.feed(message)
        follower.apply_pending()
    assert one.mirror.ledger.differences(other.mirror.ledger) == []
    assert (one.mirror.seq, one.mirror.counters) == (other.mirror.seq, other.mirror.counters)
    assert [one.mirror.requests.table(n).tolist() for n in one.mirror.requests.number.tolist()] == [
        other.mirror.requests.table(n).tolist() for n in other.mirror.requests.number.tolist()
    ]
    assert _batch([frames[0], frames[2]]).joined(None) is None, "a frame between them is missing"
    assert _batch([frames[0], replace(frames[1], epoch=9)]).joined(None) is None


def _batch(frames: Sequence[Frame]) -> FrameBatch:
    return FrameBatch(pack_frames([(frame.time_ns + 5, frame) for frame in frames], [0] * len(frames)))


def test_columns_take_a_twelfth_of_the_encoded_frames() -> None:
    _, frames = advanced(180, num_blocks=4000, num_running=32)
    assert len(pack(frames)) < sum(len(encode(frame)) for frame in frames) / 12


@pytest.mark.parametrize(
    "change",
    [
        {"seq": 1 << 63},
        {"blocks": BlockRows(ids=b"\1\0\0")},
        {"blocks": BlockRows(ids=b"\1\0\0\0", state=b"\1\1")},
        {"moves": Moves(evicted=b"\1")},
    ],
)
def test_frames_with_values_that_columns_cannot_hold_are_refused(change: dict[str, Any]) -> None:
    _, frames = advanced(3)
    with pytest.raises((ValueError, OverflowError)):
        pack([frames[0], replace(frames[1], **change)])


def test_ledger_columns_keep_their_dtype() -> None:
    annotations = BlockRows.__annotations__
    assert set(COLUMNS) < set(annotations)
    fields = {field.name: packing_of(field.type) for field in _fields()}
    assert {name: fields[name].dtype for name in COLUMNS} == COLUMNS  # type: ignore[union-attr]


def _fields() -> Any:
    import msgspec

    return msgspec.structs.fields(BlockRows)
