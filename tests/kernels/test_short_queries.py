"""Short runs of queries after long contexts, whose keys are split between programs, equal the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.decode.bounds import MAX_CUT_QUERIES, MAX_PART_TOKENS, max_cut_runs
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.dispatch import torch_ops
from kvscope_kernels.paged_prefill_attention import paged_prefill_attention

INTERPRETER = pytest.param("interpreter", marks=pytest.mark.interpreter)
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
LONG = MAX_PART_TOKENS + 1
"""A bound on lengths above which runs are split for all lengths."""
MIXED = {"seq_lens": [17, 200, 60, 0], "query_lens": [16, 5, 18, 0]}
ONE_KV_HEAD = {"num_heads": 3, "num_kv_heads": 1}
CASES: dict[str, dict[str, Any]] = {
    "plain": {**MIXED, **ONE_KV_HEAD},
    "one turn, of several tiles": {"seq_lens": [170], "query_lens": [18], **ONE_KV_HEAD},
    "sinks and a soft cap": {**MIXED, **ONE_KV_HEAD, "options": {"sinks": True, "softcap": 2.0}},
    "a window": {
        "seq_lens": [LONG + 70, 40],
        "query_lens": [7, 9],
        **ONE_KV_HEAD,
        "options": {"sliding_window": LONG, "sinks": True},
    },
    "chunks": {
        "seq_lens": [LONG + 70, 40, 2 * LONG + 3],
        "query_lens": [7, 9, 6],
        **ONE_KV_HEAD,
        "options": {"sliding_window": LONG, "is_chunked": True, "sinks": True},
    },
    "odd block, odd dims": {**MIXED, **ONE_KV_HEAD, "block_size": 7, "head_dim": 80, "value_dim": 48, "layout": "NHD"},
    "bf16": {**MIXED, **ONE_KV_HEAD, "dtype": torch.bfloat16},
    "int8": {**MIXED, **ONE_KV_HEAD, "kv_dtype": torch.int8, "options": {"sinks": True}},
    "fp8": {**MIXED, **ONE_KV_HEAD, "kv_dtype": torch.float8_e4m3fn},
    "drafts": {"seq_lens": [90, 3, 150], "query_lens": [4, 3, 2], "num_heads": 8, "num_kv_heads": 2},
}


@pytest.mark.interpreted_in_storms({"name": "bf16"}, {"name": "fp8"}, {"name": "drafts"})
@pytest.mark.parametrize("runner", [INTERPRETER, GPU], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_attention_of_short_queries_after_long_contexts_equals_the_reference(
    name: str, runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    batch = build(shape(**CASES[name]), runner.device, seed=len(name))
    bound = max(LONG, *CASES[name]["seq_lens"])
    assert_close(batch.prefill(runner.ops, max_seq_len=bound), reference(batch))


def run_two_layers(args: AttentionArgs, runs: QueryRuns, outs: list[torch.Tensor]) -> list[list[int]]:
    """Run two layers of a step and return the splits. It runs where kernels do."""
    plans = DecodePlans()
    for out in outs:
        paged_prefill_attention(args._replace(out=out), runs._replace(plans=plans))
    (plan,) = (plan for _, plan in plans.plans.values())
    ranges: list[list[int]] = plan.ranges.tolist()
    return ranges


@pytest.mark.interpreter
def test_short_query_attention_is_split_by_length_once_for_all_layers(
    interpret: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    batch = build(shape(seq_lens=[300, 20, 100], query_lens=[5, 20, 3], num_heads=2, num_kv_heads=1))
    outs = [batch.poisoned_out(), batch.poisoned_out()]
    ranges = interpret(run_two_layers, batch.args(max_seq_len=LONG), batch.runs, outs)
    assert [count for _, count in ranges] == [10, 1, 4]
    for out in outs:
        assert_close(out, reference(batch))


def test_prompts_chunks_and_full_devices_are_not_split() -> None:
    """With heads 32/8 on an H100, tiles have 16 queries and 8 programs each."""
    given = {"num_processors": 132, "num_warps": 4}
    assert max_cut_runs(16, 32768, 8, **given) == 33
    assert max_cut_runs(128, 32768, 64, **given) == 4
    assert max_cut_runs(MAX_CUT_QUERIES, 32768, 128, **given) == 2
    assert max_cut_runs(MAX_CUT_QUERIES + 1, 32768, 136, **given) == 0
    assert max_cut_runs(MAX_PART_TOKENS, MAX_PART_TOKENS, 512, **given) == 0
    assert max_cut_runs(2, MAX_PART_TOKENS, 8, **given) == 0
    assert max_cut_runs(2, MAX_PART_TOKENS + 1, 8, num_processors=132, num_warps=16) == 16


REAL: dict[str, dict[str, Any]] = {
    "16 after 32k": {"seq_lens": [32768], "query_lens": [16]},
    "64 after 32k": {"seq_lens": [32768], "query_lens": [64]},
    "unlike lengths": {"seq_lens": [32000, 700, 1, 9001, 77], "query_lens": [16, 40, 1, 3, 64]},
    "drafts": {"seq_lens": [4096 - 7 * n for n in range(16)], "query_lens": [5] * 16},
    "a window": {"seq_lens": [32768, 3000], "query_lens": [40, 7], "options": {"sliding_window": 4096}},
    "sinks, heads of 64": {
        "seq_lens": [20000, 5000],
        "query_lens": [33, 9],
        "num_heads": 64,
        "head_dim": 64,
        "options": {"sinks": True},
    },
    "a soft cap, heads of 256": {
        "seq_lens": [9000],
        "query_lens": [24],
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
        "options": {"softcap": 50.0},
    },
    "int8": {"seq_lens": [32768, 900], "query_lens": [16, 64], "kv_dtype": torch.int8},
    "fp8": {"seq_lens": [32768, 900], "query_lens": [16, 64], "kv_dtype": torch.float8_e4m3fn},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_attention_of_short_queries_with_real_model_sizes_equals_the_reference(
    name: str, shape: Any, build: Any, assert_close: Any
) -> None:
    """The torch reference in float32 is used, which tests of prefill compare with float64."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16} | REAL[name]
    batch = build(shape(**heads), "cuda", seed=len(name))
    plans, out = DecodePlans(), batch.poisoned_out()
    paged_prefill_attention(batch.args(out=out), batch.runs._replace(plans=plans))
    assert max(int(plan.ranges[:, 1].max()) for _, plan in plans.plans.values()) > 2
    assert_close(out, exact(batch.args(), batch.runs))


@pytest.mark.gpu
def test_captured_short_query_attention_is_correct_when_replayed_with_other_lengths(
    shape: Any, build: Any, assert_close: Any
) -> None:
    """The graph is captured for up to 16 queries per request and contexts of up to 32,768 tokens."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
    longest = build(shape(seq_lens=[32768, 100, 5000], query_lens=[16, 16, 16], **heads), "cuda")
    seq_lens, runs = longest.seq_lens.clone(), QueryRuns(longest.query_start.clone(), 16)
    out = longest.poisoned_out()
    args = longest.args(seq_lens=seq_lens, max_seq_len=32768)
    paged_prefill_attention(args._replace(out=out), runs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_prefill_attention(args._replace(out=out), runs)
    for lengths, counts in REPLAYED:
        runs.start.copy_(torch.tensor([0, *counts]).cumsum(0))
        seq_lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        num_rows = sum(counts)
        assert_close(out[:num_rows], exact(args._replace(query=args.query[:num_rows]), runs))
        assert out[num_rows:].isnan().all(), "rows without a request were written"


REPLAYED = (([32768, 100, 5000], [16, 16, 16]), ([20001, 3, 17], [1, 3, 16]), ([40, 100, 4097], [5, 0, 8]))


def exact(args: AttentionArgs, runs: QueryRuns) -> torch.Tensor:
    """Return the reference in float32 on the CPU, over a dequantized cache."""
    here = args._make(each.cpu() if isinstance(each, torch.Tensor) else each for each in args)
    keys, values = here.k_cache.float(), here.v_cache.float()
    if here.k_scale is not None and here.v_scale is not None:
        keys, values = keys * here.k_scale[..., None], values * here.v_scale[..., None]
    sinks = None if here.sinks is None else here.sinks.float()
    wide = here._replace(
        query=here.query.float(), k_cache=keys, v_cache=values, sinks=sinks, k_scale=None, v_scale=None
    )
    return torch_ops().prefill(wide, QueryRuns(runs.start.cpu(), runs.max_len)).double()
