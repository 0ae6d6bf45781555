"""Graphs of decodes: their sizes, when they are captured, what they share, and what is written for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvscope_engine.model.running import capture_failures
from kvscope_engine.model.running.decode_graphs import DecodeGraphs, captured_lengths, captured_sizes
from kvscope_engine.model.running.step_buffer import StepBuffer
from kvscope_engine.model.running.step_inputs import StepInputs
from kvscope_engine.model.running.step_tensors import StepTensors, table_width

BLOCK_SIZE, VOCABULARY = 16, 50


def decodes(*lengths: int) -> StepInputs:
    count = len(lengths)
    width = -(-max(lengths) // BLOCK_SIZE)
    return StepInputs(
        input_ids=np.arange(count),
        positions=np.array(lengths) - 1,
        slot_mapping=np.arange(count)[None] * BLOCK_SIZE,
        block_tables=np.full((1, count, width), 3, np.int32),
        seq_lens=np.array(lengths, np.int32),
        query_start=np.arange(count + 1, dtype=np.int32),
        num_single_token=count,
        sample_rows=np.arange(count),
    )


@dataclass
class Recorded:
    """A graph is the size that it was captured with; what a replay found in the tables."""

    graphs: DecodeGraphs
    captured: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    replayed: list[torch.Tensor] = field(default_factory=list)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Of up to 20 requests of up to 131,072 tokens."""
    inside: list[bool] = []

    @contextmanager
    def capturing(*_: object, **__: object) -> Iterator[None]:
        inside.append(True)
        yield
        inside.clear()

    def forward(tensors: StepTensors, kept: object) -> torch.Tensor:
        if inside:
            assert tensors.decode is not None
            found.captured.append(len(tensors.input_ids))
            found.lengths.append(tensors.decode.max_seq_len)
        return torch.zeros(len(tensors.input_ids), VOCABULARY)

    def replay() -> None:
        found.replayed.append(found.graphs._tables[0].clone())

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: (0, 1), replay=replay))
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    cpu = torch.device("cpu")
    buffer = StepBuffer(cpu, 0)
    made = DecodeGraphs(forward, buffer, cpu, max_num_seqs=20, max_tokens=1 << 17, block_size=BLOCK_SIZE)
    found = Recorded(made)
    return found


def test_sizes_reach_what_can_be_and_no_further() -> None:
    assert captured_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert captured_sizes(1) == (1,)
    assert captured_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert captured_sizes(1000)[-1] == 256
    assert len(captured_sizes(1000)) == 13


def test_all_sizes_are_captured_at_the_start_and_none_in_a_step(recorded: Recorded) -> None:
    """Whatever the lengths: a graph is of all of them."""
    graphs = recorded.graphs
    assert graphs.capture_all() == ""
    assert recorded.captured == [20, 16, 8, 4, 2, 1]
    assert graphs.size_of(decodes(6, 700, 30)) == 4
    assert graphs.size_of(decodes(6, 700, 1 << 17)) == 4
    assert graphs.size_of(decodes(*[5] * 20)) == 20
    assert graphs.size_of(decodes(*[5] * 21)) is None, "nor larger than can run together"
    assert not graphs.is_waiting
    assert not graphs.try_again()
    assert recorded.captured == [20, 16, 8, 4, 2, 1]


def test_where_launches_grow_with_lengths_there_are_graphs_of_several(recorded: Recorded) -> None:
    """A step takes the shortest that holds its longest request; which others it would take are captured between."""
    assert captured_lengths(1 << 17) == (4096, 16384, 65536, 1 << 17)
    assert captured_lengths(4096) == (4096,)
    assert captured_lengths(100) == (100,)
    graphs = recorded.graphs
    graphs._lengths = captured_lengths(1 << 17)
    graphs.capture_all()
    recorded.lengths.clear()
    for longest, expected in ((30, 4096), (4097, 16384)):
        step = decodes(6, longest)
        assert graphs.size_of(step) == 2
        tensors = graphs.put(step, 2)
        assert tensors.decode is not None
        assert tensors.decode.max_seq_len == 1 << 17, "the longest serves until then"
        graphs.replay(2, 2)
        assert graphs.is_waiting
        assert graphs.try_again()
        assert recorded.lengths[-1] == expected
        assert graphs.size_of(step) == 2
        tensors = graphs.put(step, 2)
        assert tensors.decode is not None
        assert tensors.decode.max_seq_len == expected
        graphs.replay(2, 2)
    assert graphs.size_of(decodes(6, 70000)) == 2
    assert graphs.size_of(decodes(5, 4000)) == 2
    assert not graphs.is_waiting
    assert recorded.lengths == [4096, 16384]


def test_a_graph_that_was_given_back_is_captured_again_while_nobody_waits_or_in_a_later_step(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    graphs, step = recorded.graphs, decodes(6, 700, 30)
    graphs.capture_all()
    recorded.captured.clear()
    assert graphs.release()
    assert graphs.size_of(step) is None
    assert not graphs.try_again(), "there is no memory yet"
    now_s[0] += capture_failures.FIRST_PAUSE_S
    assert graphs.size_of(step) == 4, "of an engine that is never idle"
    assert recorded.captured == [4]
    while graphs.is_waiting:
        assert graphs.try_again()
    assert sorted(recorded.captured) == list(graphs.sizes)


def test_all_graphs_write_one_tensor_of_logits(recorded: Recorded) -> None:
    """As large as the largest batch, not as all of them together."""
    graphs = recorded.graphs
    for size in reversed(graphs.sizes):
        graphs.capture(size)
    found = [graphs.replay(size, size) for size in graphs.sizes]
    assert {logits.data_ptr() for logits in found} == {found[0].data_ptr()}
    assert [tuple(logits.shape) for logits in found] == [(size, VOCABULARY) for size in graphs.sizes]
    assert found[0].untyped_storage().nbytes() == 4 * 20 * VOCABULARY


def test_a_replay_reads_the_tables_of_its_step(recorded: Recorded) -> None:
    """As wide as they are: the rest, which may be a long context's, is neither sent nor written."""
    graphs = recorded.graphs
    graphs.capture(graphs.largest)
    (table,) = graphs._tables
    table.fill_(-77)
    tensors = graphs.put(decodes(*[6] * 18, 40), 20)
    assert tensors.decode is not None
    assert tensors.decode.max_seq_len == 1 << 17
    (read,) = tensors.decode.block_tables
    assert read.data_ptr() == table.data_ptr()
    assert read.shape == (20, table_width(1 << 17, BLOCK_SIZE))
    graphs.replay(20, 19)
    (found,) = recorded.replayed
    assert found[:19, :3].eq(3).all()
    assert found[:, 3:].eq(-77).all()
    assert found[19:].eq(-77).all()
    assert tensors.slot_mapping[0].tolist() == [*range(0, 19 * BLOCK_SIZE, BLOCK_SIZE), -1]
    assert tensors.decode.seq_lens.tolist() == [*[6] * 18, 40, 0]
    assert tensors.input_ids.tolist() == [*range(19), 0]
