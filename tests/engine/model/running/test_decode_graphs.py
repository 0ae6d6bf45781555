"""Graphs of decodes: their sizes and lengths, what they share, and what is written for them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvscope_engine.model.running.decode_graphs import DecodeGraphs, GraphShape, captured_lengths, captured_sizes
from kvscope_engine.model.running.step_buffer import StepBuffer
from kvscope_engine.model.running.step_inputs import StepInputs
from kvscope_engine.model.running.step_tensors import StepTensors, put_decodes, table_width

BLOCK_SIZE, VOCABULARY = 16, 50


def decodes(*lengths: int) -> StepInputs:
    count = len(lengths)
    width = -(-max(lengths) // BLOCK_SIZE)
    return StepInputs(
        input_ids=np.arange(count),
        positions=np.array(lengths) - 1,
        slot_mapping=np.arange(count) * BLOCK_SIZE,
        block_tables=np.full((count, width), 3, np.int32),
        seq_lens=np.array(lengths, np.int32),
        query_start=np.arange(count + 1, dtype=np.int32),
        num_single_token=count,
        sample_rows=np.arange(count),
    )


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> DecodeGraphs:
    """Captured, of up to 20 requests of up to 131,072 tokens; a graph here is a name."""
    graph = SimpleNamespace(pool=lambda: (0, 1), replay=lambda: None)
    for name, stand_in in {
        "CUDAGraph": lambda: graph,
        "graph": lambda *_, **__: nullcontext(),
        "synchronize": lambda *_: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    def forward(tensors: StepTensors) -> torch.Tensor:
        return torch.zeros(len(tensors.input_ids), VOCABULARY)

    buffer = StepBuffer(torch.device("cpu"), 0)
    made = DecodeGraphs(forward, buffer, max_num_seqs=20, max_tokens=1 << 17, block_size=BLOCK_SIZE)
    for shape in made.shapes:
        made.capture(shape)
    return made


def test_sizes_and_lengths_reach_what_can_be_and_no_further() -> None:
    assert captured_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert captured_sizes(1) == (1,)
    assert captured_sizes(1000)[-1] == 256
    assert captured_lengths(1000) == (1000,)
    assert captured_lengths(1 << 17) == (2048, 16384, 1 << 17)


def test_short_requests_do_not_pay_for_a_long_context(graphs: DecodeGraphs) -> None:
    assert graphs.shape_of(decodes(6, 700, 30)) == GraphShape(4, 2048)
    assert graphs.shape_of(decodes(6, 2049)) == GraphShape(2, 16384)
    assert graphs.shape_of(decodes(1 << 17)) == GraphShape(1, 1 << 17)
    assert graphs.shape_of(decodes(*[5] * 21)) is None


def test_all_graphs_write_one_tensor_of_logits(graphs: DecodeGraphs) -> None:
    """As large as the largest batch, not as all of them together."""
    found = [graphs.replay(shape, shape.size) for shape in graphs.shapes]
    assert {logits.data_ptr() for logits in found} == {found[0].data_ptr()}
    assert [tuple(logits.shape) for logits in found] == [(shape.size, VOCABULARY) for shape in graphs.shapes]
    assert found[0].untyped_storage().nbytes() == 4 * 20 * VOCABULARY


class Reserved(StepBuffer):
    """Whose arrays hold a mark where nobody wrote."""

    def reserve(self, shape: tuple[int, ...], dtype: type[np.generic]) -> tuple[Any, torch.Tensor]:
        array = np.full(shape, -77, dtype)
        return array, torch.from_numpy(array)


def test_a_padded_step_is_written_where_it_is_read() -> None:
    """The rest of a table, which may be a long context's, is left as it is."""
    tensors = put_decodes(decodes(6, 40), 4, 16384, BLOCK_SIZE, Reserved(torch.device("cpu"), 0))
    assert tensors.decode is not None
    tables = tensors.decode.block_tables
    assert tables.shape == (4, table_width(16384, BLOCK_SIZE))
    assert tables[:2, :3].eq(3).all()
    assert tables[:, 3:].eq(-77).all()
    assert tables[2:].eq(-77).all()
    assert tensors.slot_mapping.tolist() == [0, 16, -1, -1]
    assert tensors.decode.seq_lens.tolist() == [6, 40, 0, 0]
    assert tensors.input_ids.tolist() == [0, 1, 0, 0]
