"""Memory reserved for steps equals what they use: partial results, logits of graphs, and the step's buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvscope_engine.model.cuda_graphs.decode_graphs import captured_sizes
from kvscope_engine.model.device_memory.step_buffer import ALIGNMENT, StepBuffer
from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.input_batch.step_limits import StepLimits
from kvscope_engine.model.input_batch.step_tensors import stage_inputs
from kvscope_engine.model.runner.step_memory import (
    PIECEWISE_GRAPH_BYTES,
    HeadShape,
    Processors,
    graph_tensor_bytes,
    shares_bytes,
    split_partials_bytes,
    step_buffer_bytes,
    step_reserves,
)
from kvscope_kernels import paged_decode_attention, paged_prefill_attention
from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.decode import plan
from kvscope_telemetry.engine_config import EngineConfig

PROCESSORS = Processors(num_multiprocessors=132, capability=90)
"""Number of processors that the launchers assume for a CPU."""
HEADS = HeadShape(num_heads=8, num_kv_heads=2, head_dim=64, element_bytes=2)


def limits(
    max_num_seqs: int, max_request_tokens: int, max_num_batched_tokens: int = 512, block_size: int = 16
) -> StepLimits:
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_request_tokens=max_request_tokens,
        block_size=block_size,
    )


def partials_of_a_launch(
    monkeypatch: pytest.MonkeyPatch,
    num_seqs: int,
    length: int,
    num_queries: int = 1,
    *,
    is_measured: bool = False,
    block_size: int = 16,
    windows: tuple[int, ...] = (0,),
    heads: HeadShape = HEADS,
) -> int:
    """Return the bytes of partial results that a launcher allocates, for decode or short runs, or of block sums for a
    measured decode. The kernels are stubs. Counts one layer per window.
    """
    module = paged_decode_attention if num_queries == 1 else paged_prefill_attention
    plans = plan.DecodePlans()

    class Kernel:
        def __getitem__(self, _: Any) -> Any:
            return lambda *_, **__: None

    monkeypatch.setattr(module, f"_{module.__name__.rpartition('.')[2]}_kernel", Kernel())
    monkeypatch.setattr(module, "merge_splits", lambda *_, **__: None)
    monkeypatch.setattr(plan, "plan_decode", lambda *_, **__: None)
    monkeypatch.setattr(module, "require_triton", lambda: None)
    cache = torch.empty(1, block_size, heads.num_kv_heads, heads.head_dim, dtype=torch.bfloat16)
    seq_lens = torch.zeros(num_seqs, dtype=torch.int32)
    for window in windows:
        args = AttentionArgs(
            torch.empty(num_seqs * num_queries, heads.num_heads, heads.head_dim, dtype=torch.bfloat16),
            cache,
            cache.clone(),
            torch.zeros(num_seqs, 16, dtype=torch.int32),
            seq_lens,
            scale=1.0,
            sliding_window=window or None,
            max_seq_len=length,
        )
        if num_queries == 1:
            shares = torch.zeros(num_seqs, -(-length // block_size)) if is_measured else None
            paged_decode_attention.paged_decode_attention(args, plans, shares)
        else:
            starts = torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries
            paged_prefill_attention.paged_prefill_attention(args, QueryRuns(starts, num_queries, plans=plans))
    if is_measured:
        return sum(room.piece_sums.nbytes + room.lse.nbytes for room in plans._sums.values())
    return sum(room.partial.nbytes + room.lse.nbytes for room in plans._split_buffers.values())


@pytest.mark.parametrize(("max_num_seqs", "max_request_tokens"), [(1, 100), (8, 4096), (70, 1 << 17)])
def test_memory_for_split_attention_results_fits_the_largest_kernel_launch(
    monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, max_request_tokens: int
) -> None:
    """For decodes, and for short runs next to them."""
    most = split_partials_bytes(limits(max_num_seqs, max_request_tokens), HEADS, PROCESSORS)
    sizes, lengths = {*captured_sizes(max_num_seqs), 65, 66} - {*range(max_num_seqs + 1, 99)}, (64, 2048, 1 << 20)
    launches = [
        partials_of_a_launch(monkeypatch, size, min(length, max_request_tokens)) for size in sizes for length in lengths
    ]
    runs = [
        partials_of_a_launch(monkeypatch, size, max_request_tokens, num_queries)
        for size in range(1, max_num_seqs + 1)
        for num_queries in (2, 16, 17, 64, 128, 250, 256, 257)
    ]
    assert max(launches) + max(runs) == most
    assert max(launches) < 8 << 20
    assert max(runs) < 32 << 20


@pytest.mark.parametrize("windows", [(0, 1024), (1024, 4096), (0, 100, 5000)], ids=str)
@pytest.mark.parametrize(("max_num_seqs", "max_request_tokens"), [(8, 4096), (32, 1 << 17)])
def test_layers_of_each_window_have_their_own_partial_results(
    monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, max_request_tokens: int, windows: tuple[int, ...]
) -> None:
    heads = replace(HEADS, windows=windows)
    counted = split_partials_bytes(limits(max_num_seqs, max_request_tokens), heads, PROCESSORS)
    sizes = range(1, max_num_seqs + 1)
    launches, runs = (
        max(
            partials_of_a_launch(monkeypatch, size, max_request_tokens, num_queries, windows=windows)
            for size in sizes
            for num_queries in queries
        )
        for queries in ((1,), (2, 16, 17, 64, 128, 250, 256, 257))
    )
    assert launches + runs <= counted <= 1.3 * (launches + runs)


SIZES = [(1, 100), (8, 4096), (70, 1 << 17), (256, 1 << 17)]


@pytest.mark.parametrize("windows", [(0,), (0, 1024)], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 256], ids=lambda dim: f"tiles for {dim}")
@pytest.mark.parametrize(("max_num_seqs", "max_request_tokens"), SIZES)
def test_memory_for_block_attention_sums_is_reserved_only_if_attention_is_measured(
    monkeypatch: pytest.MonkeyPatch,
    max_num_seqs: int,
    max_request_tokens: int,
    head_dim: int,
    block_size: int,
    windows: tuple[int, ...],
) -> None:
    """Includes the rows that every layer adds to, with and without graphs, and those being read back; never less than
    needed.
    """
    most = limits(max_num_seqs, max_request_tokens, block_size=block_size)
    heads = replace(HEADS, windows=windows, head_dim=head_dim)
    config = EngineConfig(model="any", page_heat=1, enforce_eager=True)
    counted = shares_bytes(config, most, heads, PROCESSORS)
    options: dict[str, Any] = {"is_measured": True, "block_size": block_size, "windows": windows, "heads": heads}
    largest = max(
        partials_of_a_launch(monkeypatch, size, max_request_tokens, **options) for size in captured_sizes(max_num_seqs)
    )
    table = 4 * max_num_seqs * -(-max_request_tokens // (16 * block_size)) * 16
    assert largest <= counted - 4 * table <= 1.2 * largest * (block_size // 16)
    assert counted - 4 * table < len(windows) * (52 << 20)
    with_graphs = shares_bytes(replace(config, enforce_eager=False), most, heads, PROCESSORS)
    assert with_graphs - counted == counted - 4 * table, "a graph's layers have theirs in its own memory"
    of_groups = shares_bytes(config, replace(most, num_groups=3), heads, PROCESSORS)
    assert of_groups - counted == (5 * 3 - 4) * table, "shares are merged before they are read back"
    assert shares_bytes(EngineConfig(model="any"), most, heads, PROCESSORS) == 0


def test_graph_tensors_have_the_size_of_the_largest_batch() -> None:
    assert graph_tensor_bytes(limits(20, 4096), 1000) == 4 * 20 * (1000 + 4096 // 16)
    assert graph_tensor_bytes(limits(1000, 4096), 1000) == 4 * 256 * (1000 + 4096 // 16)


def test_piecewise_graphs_are_reserved_unless_disabled(tiny_loaded: Callable[..., Any]) -> None:
    """Includes the tensors between graphs and attention: three of (512, heads, dim) in float32."""
    loaded = tiny_loaded("llama")

    def graphs(**options: Any) -> int:
        config = EngineConfig(model="any", max_num_batched_tokens=8192, **options)
        reserves = step_reserves(config, loaded, PROCESSORS)
        assert reserves.graphs > 0
        return reserves.piecewise_graphs

    crossing = 3 * 4 * 512 * loaded.num_query_heads * loaded.head_dim
    assert graphs() == graphs(piecewise_graphs=True) == PIECEWISE_GRAPH_BYTES + crossing
    assert graphs(piecewise_graphs=False) == graphs(sparse_decode=0.5) == 0
    assert graphs(enforce_eager=True) == graphs(piecewise_graphs=True, enforce_eager=True) == 0


@pytest.mark.parametrize("max_request_tokens", [100, 1 << 16])
def test_inputs_of_the_largest_step_fit_the_reserved_step_buffer(max_request_tokens: int) -> None:
    """Includes its inputs and the memory reserved for sampling."""
    most, num_seqs = limits(8, max_request_tokens), 8
    taken = 0

    class Counting(StepBuffer):
        is_on_device = True

        def reserve(self, shape: tuple[int, ...], dtype: type[np.generic]) -> tuple[Any, torch.Tensor]:
            nonlocal taken
            array, tensor = super().reserve(shape, dtype)
            taken += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            return array, tensor

        def put(self, array: Any) -> torch.Tensor:
            return self.reserve(array.shape, array.dtype.type)[1]

    counts = np.array([1, 1, 1, *[1] * (num_seqs - 4), 512 - num_seqs + 1])
    inputs = StepInputs(
        input_ids=np.zeros(512, np.int64),
        positions=np.zeros(512, np.int64),
        slot_mapping=np.zeros((1, 512), np.int64),
        block_tables=np.zeros((1, num_seqs, most.max_request_blocks), np.int32),
        seq_lens=np.full(num_seqs, max_request_tokens, np.int32),
        query_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        num_single_token=num_seqs - 1,
        sample_rows=np.zeros(num_seqs, np.int64),
    )
    stage_inputs(inputs, Counting(torch.device("cpu"), 0))
    assert 4 * num_seqs * most.max_request_blocks < taken
    assert taken + (1 << 20) <= step_buffer_bytes(most, 0) < taken + (2 << 20)
    assert step_buffer_bytes(most, 3200) == step_buffer_bytes(most, 0) + 400 * num_seqs
    assert step_buffer_bytes(most, 1 << 40) == step_buffer_bytes(most, 0) + (8 << 20)
