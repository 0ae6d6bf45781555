"""The arrays of a step, and block table rows that follow every change of a request's table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvscope_engine.model.cuda_graphs.decode_graphs import captured_sizes, padded_size
from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.input_batch.step_inputs import TableRows, build_inputs
from kvscope_engine.model.input_batch.step_tensors import stage_decodes
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

BLOCK_SIZE = 4


def make_request(number: int, prompt: list[int], output: list[int], table: list[int]) -> Request:
    return Request(
        number=number,
        request_id=f"r{number}",
        prompt_token_ids=prompt,
        sampling=ResolvedSampling(),
        max_tokens=99,
        arrival_ns=0,
        output_token_ids=output,
        block_tables=[table],
    )


def test_step_inputs_of_mixed_prefill_and_decode_have_the_expected_arrays() -> None:
    decode = make_request(1, [10, 11, 12], [13, 14], [7, 2])
    first = make_request(2, [20, 21, 22, 23, 24, 25], [], [5, 9])
    again = make_request(3, [30, 31], [32, 33], [4])
    plan = StepPlan(
        (Scheduled(decode, 4, 1, True), Scheduled(first, 1, 4, False), Scheduled(again, 0, 4, True)), num_single_token=1
    )
    inputs = build_inputs(plan, TableRows(8, 2), BLOCK_SIZE)
    assert inputs.input_ids.tolist() == [14, 21, 22, 23, 24, 30, 31, 32, 33]
    assert inputs.positions.tolist() == [4, 1, 2, 3, 4, 0, 1, 2, 3]
    assert inputs.slot_mapping.tolist() == [[8, 21, 22, 23, 36, 16, 17, 18, 19]]
    assert inputs.seq_lens.tolist() == [5, 5, 4]
    assert inputs.query_start.tolist() == [0, 1, 5, 9]
    assert inputs.sample_rows.tolist() == [0, 8]
    assert inputs.num_single_token == 1
    assert inputs.block_tables[0, 0].tolist() == [7, 2]
    assert inputs.block_tables[0, 1].tolist() == [5, 9]
    assert inputs.block_tables[0, 2, 0] == 4
    assert inputs.block_tables.dtype == np.dtype(np.int32)
    assert inputs.slot_mapping.dtype == np.dtype(np.int64)


def test_plan_with_fewer_known_tokens_than_computed_is_refused() -> None:
    request = make_request(1, [1, 2], [], [0])
    with pytest.raises(AssertionError, match="computes 3 tokens"):
        build_inputs(StepPlan((Scheduled(request, 0, 3, True),), 0), TableRows(1, 4), BLOCK_SIZE)


def test_block_table_rows_of_the_batch_follow_tables_that_grow_change_and_restart() -> None:
    rng = np.random.default_rng(0)
    rows = TableRows(num_rows=3, max_blocks=2)
    requests = [make_request(number, [0], [], []) for number in range(7)]
    for _ in range(500):
        running = [requests[index] for index in rng.permutation(7)[: rng.integers(1, 6)]]
        for request in running:
            change_table(request.block_table, rng)
        found = rows.rows_of(running)
        assert len(set(found.tolist())) == len(running)
        for row, request in zip(found, running, strict=True):
            assert rows.table[0, row, : len(request.block_table)].tolist() == request.block_table


def test_block_table_rows_of_a_sliding_window_group_equal_the_blocks_still_read() -> None:
    """Freed blocks may remain in the row; all others equal the table."""
    rng = np.random.default_rng(1)
    rows = TableRows(num_rows=2, max_blocks=2, num_groups=2)
    requests = [make_request(number, [0], [], []) for number in range(4)]
    for request in requests:
        request.block_tables, request.num_null_blocks = [[], []], [0, 0]
    for _ in range(500):
        running = [requests[index] for index in rng.permutation(4)[: rng.integers(1, 4)]]
        for request in running:
            full, window = request.block_tables
            more = rng.integers(0, 3)
            full += rng.integers(1, 10_000, more).tolist()
            window += rng.integers(1, 10_000, more).tolist()
            let_go = int(rng.integers(request.num_null_blocks[1], len(window) + 1))
            window[:let_go] = [0] * let_go
            request.num_null_blocks[1] = let_go
            if rng.integers(0, 8) == 0:  # preempted
                request.block_tables, request.num_null_blocks = [[], []], [0, 0]
        found = rows.rows_of(running)
        for row, request in zip(found, running, strict=True):
            for group, (table, let_go) in enumerate(zip(request.block_tables, request.num_null_blocks, strict=True)):
                assert rows.table[group, row, let_go : len(table)].tolist() == table[let_go:]


def change_table(table: list[int], rng: np.random.Generator) -> None:
    """Append, replace one block (copy on write), or restart (preemption)."""
    kind = rng.integers(0, 4)
    if kind == 0:
        table[:] = rng.integers(0, 10_000, rng.integers(0, 5)).tolist()
    elif kind == 1 and table:
        table[rng.integers(0, len(table))] = int(rng.integers(0, 10_000))
    else:
        table += rng.integers(0, 10_000, rng.integers(0, 3)).tolist()


def test_padding_writes_and_attends_to_nothing() -> None:
    requests = [make_request(number, [1] * 9, [5 + number], [number, 3 + number, 6]) for number in (1, 2, 3)]
    plan = StepPlan(tuple(Scheduled(request, 9, 1, True) for request in requests), num_single_token=3)
    inputs = build_inputs(plan, TableRows(4, 3), BLOCK_SIZE)
    tables = torch.full((16, 32), -1, dtype=torch.int32)
    padded, own_tables = stage_decodes(inputs, 8, 20, [tables], StepBuffer(torch.device("cpu"), 0))
    assert padded.input_ids.tolist() == [6, 7, 8, 0, 0, 0, 0, 0]
    assert padded.positions.tolist() == [9, 9, 9, 0, 0, 0, 0, 0]
    assert padded.slot_mapping[0].tolist() == [25, 25, 25, -1, -1, -1, -1, -1]
    assert padded.decode is not None
    assert padded.decode.seq_lens.tolist() == [10, 10, 10, 0, 0, 0, 0, 0]
    (read,) = padded.decode.block_tables
    assert read.shape == (8, 32)
    assert read.data_ptr() == tables.data_ptr()
    assert [each.tolist() for each in own_tables] == [[[1, 4, 6], [2, 5, 6], [3, 6, 6]]]
    assert padded.decode.max_seq_len == 20
    assert padded.num_single_token == 8


def test_prefills_are_not_padded() -> None:
    request = make_request(1, [1, 2], [], [0])
    inputs = build_inputs(StepPlan((Scheduled(request, 0, 2, True),), 0), TableRows(1, 4), BLOCK_SIZE)
    with pytest.raises(AssertionError, match="only decodes"):
        stage_decodes(inputs, 8, 16, [torch.zeros(8, 16, dtype=torch.int32)], StepBuffer(torch.device("cpu"), 0))


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20)), (32, (1, 2, 4, 8, 16, 24, 32))],
)
def test_decode_batch_is_padded_to_the_smallest_captured_graph_size(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert captured_sizes(max_num_seqs) == sizes
    for count in range(1, max_num_seqs + 1):
        size = padded_size(sizes, count)
        assert size is not None
        assert size == min(candidate for candidate in sizes if candidate >= count)
    assert padded_size(sizes, max_num_seqs + 1) is None
    assert captured_sizes(10_000)[-1] == 256
