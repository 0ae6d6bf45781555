"""The mirror's requests: block tables by their tails, several changes in one batch, and a bound on ended requests."""

from __future__ import annotations

import tracemalloc

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import RequestInfo, RequestRows
from kvscope_telemetry.mirror.coalesce import merge_request_rows
from kvscope_telemetry.mirror.request_mirror import RequestMirror, equal_requests, read_changes

NO_ROWS = RequestRows()


def _info(number: int) -> RequestInfo:
    return RequestInfo(number=number, request_id=f"r{number}", arrival_ns=number, num_prompt_tokens=number)


def _row(number: int, state: RequestState, start: int, blocks: list[int], output: int = 0) -> RequestRows:
    u32 = "<u4"
    return RequestRows(
        number=np.array([number], u32).tobytes(),
        state=bytes([state]),
        num_computed_tokens=np.array([output + 1], u32).tobytes(),
        num_cached_tokens=np.array([0], u32).tobytes(),
        num_output_tokens=np.array([output], u32).tobytes(),
        num_preemptions=np.array([3], "<u2").tobytes(),
        table_start=np.array([start], u32).tobytes(),
        table_count=np.array([len(blocks)], u32).tobytes(),
        table_blocks=np.array(blocks, u32).tobytes(),
    )


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_block_tables_match_a_plain_model_for_any_batching(data: st.DataObject) -> None:
    """Each change keeps a prefix of the table and appends to it; a batch has any number of changes."""
    mirror = RequestMirror()
    mirror.apply([_info(n) for n in (1, 2, 3)], NO_ROWS, time_ns=1)
    model: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for _ in range(data.draw(st.integers(1, 4))):
        batch = []
        for output in range(data.draw(st.integers(1, 8))):
            number = data.draw(st.sampled_from((1, 2, 3)))
            start = data.draw(st.integers(0, len(model[number])))
            blocks = data.draw(st.lists(st.integers(0, 99), max_size=5))
            model[number] = model[number][:start] + blocks
            batch.append(_row(number, RequestState.RUNNING, start, blocks, output))
        mirror.apply((), merge_request_rows(batch), time_ns=2)
        for number, table in model.items():
            assert mirror.table(number).tolist() == table
            row = mirror.row_of(number)
            assert row is not None
            assert mirror.num_blocks[row] == len(table)
        mirror.num_reserved = 50
        assert mirror.num_held.tolist() == [sum(block >= 50 for block in table) for table in model.values()]
        mirror.num_reserved = 0


def test_gap_inside_a_batch_is_refused() -> None:
    mirror = RequestMirror()
    mirror.apply([_info(1)], _row(1, RequestState.RUNNING, 0, [5, 6, 7]), time_ns=1)
    cut_then_far = [_row(1, RequestState.RUNNING, 1, []), _row(1, RequestState.RUNNING, 3, [9])]
    with pytest.raises(ProtocolError, match="starts at block 3, but the table has only 1"):
        mirror.apply((), merge_request_rows(cut_then_far), time_ns=2)
    assert mirror.table(1).tolist() == [5, 6, 7]


def test_requests_are_sorted_by_number() -> None:
    mirror = RequestMirror()
    mirror.apply([_info(5)], _row(5, RequestState.RUNNING, 0, [1]), time_ns=1)
    mirror.apply([_info(9), _info(2), _info(5)], _row(2, RequestState.RUNNING, 0, [8]), time_ns=2)
    assert mirror.number.tolist() == [2, 5, 9]
    assert [mirror.request_id(n) for n in (2, 5, 9)] == ["r2", "r5", "r9"]
    assert mirror.table(5).tolist() == [1]
    assert mirror.table(2).tolist() == [8]
    assert mirror.row_of(3) is None
    assert mirror.table(3).size == 0
    assert mirror.first_seen_ns.tolist() == [2, 1, 2]


def test_memory_of_a_dropped_request_is_zeroed_when_reused_for_a_new_one() -> None:
    mirror = RequestMirror(max_finished=1)
    for number in range(1, 60):
        mirror.apply([_info(number)], _row(number, RequestState.FINISHED, 0, [], 7), time_ns=number)
    mirror.apply([_info(100)], NO_ROWS, time_ns=100)
    row = mirror.row_of(100)
    assert row is not None
    assert (mirror.state[row], mirror.num_output_tokens[row], mirror.num_preemptions[row]) == (0, 0, 0)


def test_ended_requests_are_bounded_and_the_newest_stay() -> None:
    mirror = RequestMirror(max_finished=100)
    mirror.apply([_info(1)], _row(1, RequestState.RUNNING, 0, [4]), time_ns=1)
    for number in range(2, 1000):
        mirror.apply([_info(number)], _row(number, RequestState.FINISHED, 0, []), time_ns=number)
        assert len(mirror) <= 1 + 125
    assert mirror.table(1).tolist() == [4]
    assert mirror.number[-1] == 999
    assert mirror.number[1] > 850
    assert len(mirror.request_ids) == len(mirror) == len(mirror.number)
    assert mirror.finished_ns[-1] == 999


def test_comparison_of_request_mirrors_detects_different_block_tables() -> None:
    left, right = RequestMirror(), RequestMirror()
    for mirror in (left, right):
        mirror.apply([_info(1)], _row(1, RequestState.RUNNING, 0, [4, 5]), time_ns=1)
    assert equal_requests(left, right, ["number", "num_blocks"])
    right.apply((), _row(1, RequestState.RUNNING, 1, [6]), time_ns=1)
    assert not equal_requests(left, right, ["number", "num_blocks"])


def test_holders_of_a_block_are_found_without_copying_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page map asks for the holders at each mouse move."""
    mirror, length = RequestMirror(), 100_000
    mirror.apply([_info(n) for n in (1, 2, 3)], NO_ROWS, time_ns=1)
    tables = {number: list(range(number * length, (number + 1) * length)) for number in (1, 2, 3)}
    rows = [_row(number, RequestState.RUNNING, 0, table) for number, table in tables.items()]
    mirror.apply((), merge_request_rows(rows), time_ns=2)
    tracemalloc.start()
    try:
        assert mirror.holders(3 * length + 7, limit=9) == [3]
        assert mirror.index_in_tables(3, 3 * length + 7) == (0, 7)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * length, "one byte a block of one table at a time, where a copy takes four"
    looked_at: list[int] = []
    held = mirror.held

    def noted(row: int, group: int) -> npt.NDArray[np.int32]:
        looked_at.append(row)
        return held(row, group)

    monkeypatch.setattr(mirror, "held", noted)
    assert mirror.holders(2 * length, limit=1, first=2) == [2]
    assert looked_at == [mirror.row_of(2)], "the owner must be checked first"


def _in_group(group: int, rows: RequestRows) -> RequestRows:
    return msgspec.structs.replace(rows, table_group=np.array([group], "<u4").tobytes())


def test_each_kv_group_has_its_own_tables() -> None:
    mirror, running = RequestMirror(max_finished=0), RequestState.RUNNING
    mirror.apply([_info(1), _info(2)], NO_ROWS, time_ns=1)
    changes = [_row(1, running, 0, [4, 5]), _in_group(2, _row(1, running, 0, [9])), _row(2, running, 0, [7])]
    changes += [_in_group(2, _row(1, running, 1, [8])), _in_group(0, _row(1, running, 1, [6]))]
    mirror.apply((), merge_request_rows(changes), time_ns=2)
    assert mirror.groups == [0, 2]
    assert [mirror.table(1, group).tolist() for group in (0, 1, 2)] == [[4, 6], [], [9, 8]]
    assert mirror.table(2).tolist() == [7]
    assert mirror.table(2, 2).size == 0
    assert mirror.blocks(1).tolist() == [4, 6, 9, 8]
    assert (mirror.holders(8, limit=9), mirror.index_in_tables(1, 8)) == ([1], (2, 1))
    assert mirror.num_held.tolist() == [4, 1]
    mirror.num_reserved = 7
    assert mirror.num_held.tolist() == [2, 1]
    assert (mirror.blocks(1).tolist(), mirror.blocks(1, 0).tolist()) == ([9, 8], [])
    mirror.num_reserved = 0
    again = RequestMirror()
    again.reset([_info(1), _info(2)], mirror.pack(np.arange(2), np.zeros(2, np.int64)), time_ns=2, same_epoch=False)
    assert equal_requests(mirror, again, ["number", "num_blocks", "state"])
    mirror.apply((), _in_group(2, _row(1, running, 1, [])), time_ns=3)
    assert not equal_requests(mirror, again, ["number"])
    mirror.reset([_info(2)], _row(2, running, 0, [7]), time_ns=4, same_epoch=True)
    assert mirror.blocks(1).size == 0, "it ended unseen, in all groups"
    mirror.apply((), _in_group(2, _row(2, running, 0, [11])), time_ns=5)
    mirror.reset([_info(2)], _row(2, running, 0, [7]), time_ns=6, same_epoch=True)
    assert mirror.blocks(2).tolist() == [7], "a snapshot leaves out empty tables"


@pytest.mark.parametrize(
    ("group", "start", "words"), [(256, 0, "at most 255"), (1, 1, "starts at block 1, but the table has only 0 blocks")]
)
def test_invalid_kv_group_block_table_is_refused_and_changes_nothing(group: int, start: int, words: str) -> None:
    mirror = RequestMirror()
    mirror.apply([_info(1)], NO_ROWS, time_ns=1)
    changes = [_row(1, RequestState.RUNNING, 0, [3]), _in_group(group, _row(1, RequestState.RUNNING, start, [5]))]
    with pytest.raises(ProtocolError, match=words):
        mirror.apply((), merge_request_rows(changes), time_ns=2)
    assert mirror.blocks(1).size == 0


def test_more_than_65536_requests_are_changed_in_order() -> None:
    numbers = np.arange(1, (1 << 16) + 3)
    rows = [_row(number, RequestState.RUNNING, start, [number]) for number in (1, 65_537) for start in (0, 1)]
    changes = read_changes(merge_request_rows(rows), numbers, np.zeros(numbers.size, np.int32))
    assert changes.rows.tolist() == [0, 0, 65_536, 65_536]
    assert changes.table_end.tolist() == [1, 2, 1, 2]
