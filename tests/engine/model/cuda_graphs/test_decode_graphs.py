"""Decode graphs: their sizes, when they are captured, what they share, and their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch

from kvscope_engine.model.cuda_graphs import capture_failures
from kvscope_engine.model.cuda_graphs.decode_graphs import DecodeGraphs, captured_lengths, captured_sizes
from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.input_batch.step_limits import StepLimits
from kvscope_engine.model.input_batch.step_tensors import StepTensors, table_width

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
class RecordedGraphs:
    """Decode graphs whose captures are recorded with their size, and what a replay finds in the block tables."""

    graphs: DecodeGraphs
    captured: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    replayed: list[torch.Tensor] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    """Errors raised by captures of a size, after their first operations."""
    pools: list[Any] = field(default_factory=list)
    """The memory pool given to each capture."""
    alive: WeakSet[Any] = field(default_factory=WeakSet)
    """Graphs and tensors computed in captures."""
    num_alive: list[int] = field(default_factory=list)
    """How many of them were alive when a capture started or memory was returned to the driver."""


class Graph:
    """A graph whose replays are recorded; it has its own pool unless it is given one."""

    def __init__(self, recorded: RecordedGraphs) -> None:
        self._recorded = recorded
        self._pool: Any = object()
        recorded.alive.add(self)

    def begin(self, pool: Any) -> None:
        self._pool = pool or self._pool
        self._recorded.pools.append(pool)

    def pool(self) -> Any:
        return self._pool

    def replay(self) -> None:
        self._recorded.replayed.append(self._recorded.graphs._tables[0].clone())


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedGraphs:
    """Decode graphs for up to 20 requests of up to 131,072 tokens."""
    inside: list[bool] = []

    @contextmanager
    def capturing(graph: Graph, pool: Any, **_: object) -> Iterator[None]:
        found.num_alive.append(len(found.alive) - 1)
        graph.begin(pool)
        inside.append(True)
        try:
            yield
        finally:
            inside.clear()

    def forward(tensors: StepTensors, kept: object) -> torch.Tensor:
        if inside:
            size = len(tensors.input_ids)
            activations = torch.zeros(size)
            found.alive.add(activations)
            if (error := found.errors.get(size)) is not None:
                raise error
            assert tensors.decode is not None
            found.captured.append(len(tensors.input_ids))
            found.lengths.append(tensors.decode.max_seq_len)
        return torch.zeros(len(tensors.input_ids), VOCABULARY)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(found))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.num_alive.append(len(found.alive)))
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    cpu = torch.device("cpu")
    buffer = StepBuffer(cpu, 0)
    limits = StepLimits(max_num_seqs=20, max_num_batched_tokens=512, max_request_tokens=1 << 17, block_size=BLOCK_SIZE)
    made = DecodeGraphs(forward, buffer, limits)
    found = RecordedGraphs(made)
    return found


def test_captured_sizes_cover_the_maximum_batch() -> None:
    assert captured_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert captured_sizes(1) == (1,)
    assert captured_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert captured_sizes(1000)[-1] == 256
    assert len(captured_sizes(1000)) == 13


def test_all_sizes_are_captured_at_the_start_and_none_in_a_step(recorded: RecordedGraphs) -> None:
    """A graph serves all sequence lengths."""
    graphs = recorded.graphs
    assert graphs.capture_all() == ""
    assert recorded.captured == [20, 16, 8, 4, 2, 1]
    assert graphs.size_of(decodes(6, 700, 30)) == 4
    assert graphs.size_of(decodes(6, 700, 1 << 17)) == 4
    assert graphs.size_of(decodes(*[5] * 20)) == 20
    assert graphs.size_of(decodes(*[5] * 21)) is None, "no graph is larger than the maximum batch"
    assert not graphs.is_waiting
    assert not graphs.capture_pending()
    assert recorded.captured == [20, 16, 8, 4, 2, 1]


def test_graphs_for_several_lengths_are_captured_if_launches_grow_with_length(recorded: RecordedGraphs) -> None:
    """A step uses the shortest graph that holds its longest request; other needed ones are captured between steps."""
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
        tensors = graphs.stage(step, 2)
        assert tensors.decode is not None
        assert tensors.decode.max_seq_len == 1 << 17, "the longest serves until then"
        graphs.replay(2)
        assert graphs.is_waiting
        assert graphs.capture_pending()
        assert recorded.lengths[-1] == expected
        assert graphs.size_of(step) == 2
        tensors = graphs.stage(step, 2)
        assert tensors.decode is not None
        assert tensors.decode.max_seq_len == expected
        graphs.replay(2)
    assert graphs.size_of(decodes(6, 70000)) == 2
    assert graphs.size_of(decodes(5, 4000)) == 2
    assert not graphs.is_waiting
    assert recorded.lengths == [4096, 16384]


def test_released_graph_is_captured_again_when_idle_or_in_a_later_step(
    recorded: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s[0])
    graphs, step = recorded.graphs, decodes(6, 700, 30)
    graphs.capture_all()
    recorded.captured.clear()
    assert graphs.release()
    assert graphs.size_of(step) is None
    assert not graphs.capture_pending(), "there is no memory yet"
    now_s[0] += capture_failures.FIRST_PAUSE_S
    assert graphs.size_of(step) == 4, "captured in a step of an engine that is never idle"
    assert recorded.captured == [4]
    while graphs.is_waiting:
        assert graphs.capture_pending()
    assert sorted(recorded.captured) == list(graphs.sizes)


def test_decode_graphs_released_a_second_time_are_recaptured_largest_size_first(
    recorded: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is never idle may have captured another size first; the others use the memory of its pool."""
    now_s = [100.0]
    monkeypatch.setattr(capture_failures.time, "monotonic", lambda: now_s[0])
    graphs = recorded.graphs
    graphs.capture_all()
    graphs.release()
    now_s[0] += capture_failures.FIRST_PAUSE_S
    assert graphs.size_of(decodes(6, 700, 30)) == 4
    while graphs.is_waiting:
        graphs.capture_pending()
    graphs.release()
    now_s[0] += capture_failures.FIRST_PAUSE_S
    recorded.captured.clear()
    while graphs.is_waiting:
        graphs.capture_pending()
    assert recorded.captured == [20, 16, 8, 4, 2, 1]


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
REFUSED = RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_failed_graph_is_freed_before_the_next_capture(recorded: RecordedGraphs) -> None:
    """Its tensors are freed as well, before memory is returned to the driver, so that the next capture can use all of
    it. A cuBLAS workspace in its pool would be freed while the next replays read it.
    """
    graphs = recorded.graphs
    recorded.errors = dict.fromkeys((20, 16, 4, 2), NO_MEMORY)
    assert graphs.capture_all() == ""
    assert recorded.captured == [8, 1]
    assert recorded.num_alive == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1], "no graph until 8 is captured, then that one"
    assert recorded.pools[:3] == [None] * 3
    assert set(recorded.pools[3:]) == {recorded.pools[3]} != {None}


def test_size_that_does_not_compile_is_skipped(recorded: RecordedGraphs) -> None:
    """Triton's errors are not torch's. The size is tried once; errors of our own code are raised."""
    errors = pytest.importorskip("triton.runtime.errors")
    graphs = recorded.graphs
    recorded.errors[8] = errors.OutOfResources(2 << 18, 1 << 17, "shared memory")
    assert graphs.capture_all() == ""
    assert recorded.captured == [20, 16, 4, 2, 1]
    assert graphs.size_of(decodes(*[5] * 8)) == 16
    assert not graphs.is_waiting
    recorded.errors[8] = KeyError("ours")
    with pytest.raises(KeyError, match="ours"):
        graphs.capture(8)


def test_graphs_after_a_refused_capture_have_a_pool_that_can_be_freed(recorded: RecordedGraphs) -> None:
    """torch never frees the pool in which a capture was refused."""
    graphs = recorded.graphs
    recorded.errors[8] = REFUSED
    assert graphs.capture_all() == ""
    pools = recorded.pools
    assert len(pools) == len(graphs.sizes)
    first, second = pools[1], pools[4]
    assert pools == [None, first, first, None, second, second]
    assert first is not second


def test_library_failure_of_the_largest_size_skips_only_that_size(recorded: RecordedGraphs) -> None:
    graphs = recorded.graphs
    recorded.errors[graphs.largest] = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")
    assert graphs.capture_all() == ""
    assert len(recorded.pools) == len(graphs.sizes)


@pytest.mark.parametrize(("error", "num_tries"), [(REFUSED, 1), (NO_MEMORY, 6)])
def test_model_refused_by_cuda_is_tried_once(recorded: RecordedGraphs, error: Exception, num_tries: int) -> None:
    """Each try would leak memory. If memory was insufficient, smaller sizes are tried."""
    graphs = recorded.graphs
    recorded.errors = dict.fromkeys(graphs.sizes, error)
    assert graphs.capture_all() == f"{type(error).__name__}: {error}"
    assert len(recorded.pools) == num_tries


def test_all_graphs_write_one_tensor_of_logits(recorded: RecordedGraphs) -> None:
    """It has the size of the largest batch."""
    graphs = recorded.graphs
    for size in reversed(graphs.sizes):
        graphs.capture(size)
    found = []
    for size in graphs.sizes:
        graphs.stage(decodes(*[5] * size), size)
        found.append(graphs.replay(size))
    assert {logits.data_ptr() for logits in found} == {found[0].data_ptr()}
    assert [tuple(logits.shape) for logits in found] == [(size, VOCABULARY) for size in graphs.sizes]
    assert found[0].untyped_storage().nbytes() == 4 * 20 * VOCABULARY


def test_replay_reads_the_block_tables_of_its_step(recorded: RecordedGraphs) -> None:
    """Only the used width is sent; the rest may belong to a long context."""
    graphs = recorded.graphs
    graphs.capture(graphs.largest)
    (table,) = graphs._tables
    table.fill_(-77)
    tensors = graphs.stage(decodes(*[6] * 18, 40), 20)
    assert tensors.decode is not None
    assert tensors.decode.max_seq_len == 1 << 17
    (read,) = tensors.decode.block_tables
    assert read.data_ptr() == table.data_ptr()
    assert read.shape == (20, table_width(1 << 17, BLOCK_SIZE))
    graphs.replay(19)
    (found,) = recorded.replayed
    assert found[:19, :3].eq(3).all()
    assert found[:, 3:].eq(-77).all()
    assert found[19:].eq(-77).all()
    assert tensors.slot_mapping[0].tolist() == [*range(0, 19 * BLOCK_SIZE, BLOCK_SIZE), -1]
    assert tensors.decode.seq_lens.tolist() == [*[6] * 18, 40, 0]
    assert tensors.input_ids.tolist() == [*range(19), 0]
