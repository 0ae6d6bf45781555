"""The mirror: equal to the engine after every update, and unchanged by an update that does not fit."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import COLUMNS, BlockRows, Ledger
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Frame, RequestInfo, RequestRows
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import Update


def _following(num_blocks: int = 200, *, seed: int = 0) -> tuple[SimulatedEngine, Mirror]:
    engine = SimulatedEngine(num_blocks=num_blocks, num_running=8, seed=seed)
    mirror = Mirror()
    mirror.apply(Update(snapshot=engine.snapshot()))
    return engine, mirror


def _rows_of_one_block(block: int, **values: int) -> BlockRows:
    ledger = Ledger(block + 1)
    for name, value in values.items():
        getattr(ledger, name)[block] = value
    return ledger.pack(np.array([block], np.uint32))


def _frame(engine: SimulatedEngine, **fields: object) -> Frame:
    return Frame(epoch=1, seq=engine.seq + 1, step=engine.step + 1, time_ns=1, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_mirror_equals_the_engine_after_every_step(
    seed: int, same_requests: Callable[[Mirror, SimulatedEngine], None]
) -> None:
    engine, mirror = _following(seed=seed)
    for _ in range(250):
        mirror.apply(coalesce([engine.advance()]))
        assert mirror.ledger.differences(engine.ledger) == []
        counts = np.bincount(engine.ledger.state, minlength=3).tolist()
        assert [mirror.num_free, mirror.num_active, mirror.num_cached] == counts
    same_requests(mirror, engine)
    assert (mirror.seq, mirror.step, mirror.epoch) == (250, 250, 1)
    assert mirror.counters.preemptions > 0


def test_mirror_that_starts_late_gets_the_whole_state_from_a_snapshot(
    same_requests: Callable[[Mirror, SimulatedEngine], None],
) -> None:
    engine = SimulatedEngine(num_blocks=200, num_running=8)
    for _ in range(300):
        engine.advance()
    mirror = Mirror()
    mirror.reset(engine.snapshot())
    for _ in range(50):
        mirror.apply(coalesce([engine.advance()]))
    assert mirror.ledger.equals(engine.ledger)
    same_requests(mirror, engine)


def test_block_changed_twice_in_one_update_has_the_later_state_and_counts_once() -> None:
    engine, mirror = _following()
    free = int(np.flatnonzero(mirror.ledger.state == 0)[0])
    num_free = mirror.num_free
    frames = [_frame(engine, blocks=_rows_of_one_block(free, state=s, ref_count=s)) for s in (2, 1, 2)]
    mirror.apply(coalesce(frames))
    assert mirror.ledger.state[free] == 2
    assert mirror.num_free == num_free - 1
    assert mirror.num_cached == np.count_nonzero(mirror.ledger.state == 2)


def _rows(number: int, state: int = 1, start: int = 0, blocks: tuple[int, ...] = ()) -> RequestRows:
    return RequestRows(
        number=number.to_bytes(4, "little"),
        state=bytes([state]),
        num_computed_tokens=b"\1\0\0\0",
        num_cached_tokens=b"\0" * 4,
        num_output_tokens=b"\0" * 4,
        num_preemptions=b"\0" * 2,
        table_start=start.to_bytes(4, "little"),
        table_count=len(blocks).to_bytes(4, "little"),
        table_blocks=b"".join(b.to_bytes(4, "little") for b in blocks),
    )


MISFITS: dict[str, dict[str, object]] = {
    "block id out of range": {"blocks": _rows_of_one_block(200)},
    "negative reference count": {"blocks": _rows_of_one_block(3, ref_count=-1)},
    "negative owner": {"blocks": _rows_of_one_block(3, owner=-2)},
    "more slots than there are": {"blocks": _rows_of_one_block(3, filled=17)},
    "request never announced": {"requests": _rows(9999)},
    "table with a hole": {"requests": _rows(1, start=10_000, blocks=(1,))},
    "table block out of range": {"requests": _rows(1, blocks=(200,))},
    "good blocks, bad request": {"blocks": _rows_of_one_block(3, state=1), "requests": _rows(9999)},
    "good request, bad block": {"blocks": _rows_of_one_block(200), "requests": _rows(1, state=3)},
}


@pytest.mark.parametrize("name", MISFITS)
def test_invalid_update_is_refused_and_leaves_the_mirror_unchanged(name: str) -> None:
    engine, mirror = _following()
    mirror.apply(coalesce([engine.advance()]))
    before = Ledger(mirror.num_blocks)
    for column in COLUMNS:
        getattr(before, column)[:] = getattr(mirror.ledger, column)
    states, tables = mirror.requests.state.copy(), [mirror.requests.table(n) for n in mirror.requests.number]
    with pytest.raises(ProtocolError):
        mirror.apply(coalesce([_frame(engine, **MISFITS[name])]))
    assert mirror.ledger.equals(before)
    assert mirror.seq == engine.seq
    np.testing.assert_array_equal(mirror.requests.state, states)
    for number, table in zip(mirror.requests.number.tolist(), tables, strict=True):
        np.testing.assert_array_equal(mirror.requests.table(number), table)


def test_invalid_snapshot_keeps_the_previous_state() -> None:
    engine, mirror = _following()
    good = engine.snapshot()
    for bad in (
        msgspec.structs.replace(good, requests=_rows(77)),
        msgspec.structs.replace(good, requests=_rows(1, blocks=(200,))),
        msgspec.structs.replace(good, blocks=Ledger(200).pack_all(), requests=_rows(1, start=1)),
    ):
        with pytest.raises(ProtocolError):
            mirror.reset(bad)
        assert mirror.ledger.equals(engine.ledger)
        assert len(mirror.requests) == len(good.requests_info)


def test_frames_before_the_first_snapshot_are_refused() -> None:
    engine = SimulatedEngine(num_blocks=200)
    with pytest.raises(ProtocolError, match="first snapshot"):
        Mirror().apply(coalesce([engine.advance()]))
    Mirror().apply(coalesce(()))


def test_snapshot_of_a_new_engine_run_replaces_the_mirror_including_its_size() -> None:
    _, mirror = _following()
    other = SimulatedEngine(num_blocks=77, num_running=3, epoch=2)
    for _ in range(5):
        other.advance()
    mirror.apply(Update(snapshot=other.snapshot()))
    assert mirror.epoch == 2
    assert mirror.ledger.equals(other.ledger)
    assert mirror.num_free + mirror.num_active + mirror.num_cached == 77
    assert not (mirror.requests.state == RequestState.FINISHED).any()


def test_snapshot_of_the_same_engine_run_is_written_into_the_existing_mirror_arrays() -> None:
    engine, mirror = _following()
    view = mirror.ledger.state
    for _ in range(20):
        engine.advance()
    mirror.reset(engine.snapshot())
    assert mirror.ledger.state is view


def test_ended_requests_stay_and_missing_ones_are_finished_within_an_epoch() -> None:
    engine, mirror = _following()
    number = 10_000
    info = RequestInfo(number=number, request_id="mine", arrival_ns=1, num_prompt_tokens=1)
    mirror.apply(coalesce([_frame(engine, new_requests=(info,), requests=_rows(number, blocks=(1, 2)))]))
    assert mirror.requests.table(number).tolist() == [1, 2]
    mirror.reset(engine.snapshot())
    row = mirror.requests.row_of(number)
    assert row is not None
    assert mirror.requests.state[row] == RequestState.FINISHED
    assert mirror.requests.table(number).size == 0
    assert mirror.requests.finished_ns[row] > 0


def test_mirror_version_increases_with_each_update() -> None:
    engine, mirror = _following()
    version = mirror.version
    mirror.apply(coalesce([engine.advance()]))
    assert mirror.version > version
