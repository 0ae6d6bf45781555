"""Prefill attention equals a float64 reference for ragged batches, cached prefixes, options and invalid inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import QueryRuns
from kvscope_kernels.paged_prefill_attention import paged_prefill_attention, paged_prefill_attention_torch

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 20},
    "chunks": {"sliding_window": 12, "is_chunked": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 13, "softcap": 2.0, "sinks": True},
}
ONE_OPTION = ("window", "chunks", "softcap", "sinks")
"""The options that "all" combines, and chunks."""
HEADS = [(9, 3), (3, 3), (8, 2), (8, 1)]
ONE_OPTION_ON_CPU = [
    {"fast_runner": runner, "options": option, "heads": heads}
    for runner in ("torch", "compiled")
    for option in ONE_OPTION
    for heads in HEADS[1:]
]
RAGGED = {"seq_lens": [0, 1, 15, 16, 17, 40], "query_lens": [0, 1, 15, 16, 17, 40]}  # around a block of 16
CONTINUED = {"seq_lens": [16, 17, 33, 100, 70, 0], "query_lens": [1, 16, 2, 5, 33, 0]}
FEW = {"seq_lens": [17, 40], "query_lens": [17, 2]}
ONE_KV_HEAD = {"num_heads": 3, "num_kv_heads": 1}
"""One KV head, which halves the programs of the interpreter; other tests have several."""
SMALL: dict[str, dict[str, Any]] = {
    **{f"ragged {name}": {**RAGGED, "options": options} for name, options in OPTIONS.items()},
    **{f"continued {name}": {**CONTINUED, **ONE_KV_HEAD, "options": options} for name, options in OPTIONS.items()},
    "bf16": {**CONTINUED, **ONE_KV_HEAD, "dtype": torch.bfloat16},
    "bf16 all": {**RAGGED, **ONE_KV_HEAD, "dtype": torch.bfloat16, "options": OPTIONS["all"]},
    "odd block, odd dims": {**CONTINUED, "block_size": 7, "head_dim": 80, "value_dim": 48},
    "slots of one": {"seq_lens": [9, 3], "query_lens": [2, 3], "block_size": 1, "layout": "NHD"},
    "group of 8": {**FEW, "num_heads": 8, "num_kv_heads": 1, "head_dim": 128},
    "group of 1": {**FEW, "num_heads": 3, "num_kv_heads": 3, "layout": "NHD"},
    "group of 20": {**FEW, "num_heads": 20, "num_kv_heads": 1},
    "window shorter than the tile": {
        "seq_lens": [140],
        "query_lens": [137],
        "num_heads": 1,
        "num_kv_heads": 1,
        "dtype": torch.bfloat16,
        "options": {"sliding_window": 5},
    },
    "chunks shorter than the tile": {
        "seq_lens": [140],
        "query_lens": [137],
        "num_heads": 1,
        "num_kv_heads": 1,
        "options": {"sliding_window": 5, "is_chunked": True, "softcap": 2.0, "sinks": True},
    },
    "chunks of several tiles": {
        "seq_lens": [190, 130, 90],
        "query_lens": [60, 3, 90],
        "num_heads": 1,
        "num_kv_heads": 1,
        "dtype": torch.bfloat16,
        "options": {"sliding_window": 80, "is_chunked": True},
    },
    "one query each": {"seq_lens": [17, 1, 64], "query_lens": [1, 1, 1]},
    "equal, from the start": {"seq_lens": [33, 33], "query_lens": [33, 33]},
    "equal, continued": {"seq_lens": [50, 50], "query_lens": [7, 7], "options": {"sliding_window": 20}},
    "one request": {"seq_lens": [90], "query_lens": [90], "num_heads": 2, "num_kv_heads": 1},
}


@pytest.mark.interpreted_in_storms(
    *({"name": f"{how} {one}"} for how in ("ragged", "continued") for one in ONE_OPTION if one != "chunks")
)
@pytest.mark.parametrize("name", SMALL)
def test_prefill_attention_equals_the_float64_reference(
    name: str, runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    batch = build(shape(**SMALL[name]), runner.device, seed=len(name))
    assert_close(batch.prefill(runner.ops), reference(batch))


@pytest.mark.storm(*ONE_OPTION_ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_prefill_attention_of_every_head_shape_equals_the_reference(
    heads: tuple[int, int],
    head_dim: int,
    options: str,
    dtype: torch.dtype,
    fast_runner: Any,
    shape: Any,
    build: Any,
    reference: Any,
    assert_close: Any,
) -> None:
    batch = build(
        shape(
            seq_lens=[5, 33, 0, 48],
            query_lens=[5, 7, 0, 1],
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            dtype=dtype,
            options=OPTIONS[options],
        ),
        fast_runner.device,
        seed=head_dim,
    )
    assert_close(batch.prefill(fast_runner.ops), reference(batch))


@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_attention_of_long_and_short_requests_equals_the_reference(
    options: str, fast_runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    lengths = {"seq_lens": [400, 16, 300, 1000, 5, 17], "query_lens": [400, 16, 300, 40, 1, 17]}
    batch = build(shape(**lengths, options=OPTIONS[options], num_heads=2), fast_runner.device)
    assert_close(batch.prefill(fast_runner.ops), reference(batch))


@pytest.mark.interpreted_in_storms(*({"options": one} for one in ("plain", *ONE_OPTION)))
@pytest.mark.parametrize("options", OPTIONS)
def test_chunks_give_the_result_of_the_whole_prompt(options: str, runner: Any, shape: Any, build: Any) -> None:
    """A prompt of 60 tokens runs in one step, and in steps of 1, 16, 17 and 26 tokens with the same cache."""
    whole = build(shape(seq_lens=[60], query_lens=[60], options=OPTIONS[options], **ONE_KV_HEAD), runner.device)
    at_once = whole.prefill(runner.ops)
    start = 0
    for num_queries in (1, 16, 17, 26):
        end = start + num_queries
        counts = torch.tensor([0, num_queries], dtype=torch.int32, device=runner.device)
        seq_lens = torch.tensor([end], dtype=torch.int32, device=runner.device)
        args = whole.args(query=whole.query[start:end], seq_lens=seq_lens)
        chunk = runner.ops.prefill(args, QueryRuns(counts, num_queries))
        torch.testing.assert_close(chunk, at_once[start:end], rtol=0, atol=2e-6)
        start = end


def test_prefill_attention_does_not_depend_on_the_order_of_requests(fast_runner: Any, shape: Any, build: Any) -> None:
    lengths, order = [5, 200, 31, 64], [2, 0, 3, 1]
    batch = build(shape(seq_lens=lengths, query_lens=lengths), fast_runner.device)
    rows = torch.cat([torch.arange(*batch.query_start[i : i + 2].tolist()) for i in order]).to(fast_runner.device)
    starts = torch.tensor([0, *(lengths[i] for i in order)]).cumsum(0).to(torch.int32).to(fast_runner.device)
    tables, seq_lens = batch.block_tables[order], batch.seq_lens[order]
    args = batch.args(query=batch.query[rows], block_tables=tables, seq_lens=seq_lens)
    permuted = fast_runner.ops.prefill(args, QueryRuns(starts, 200))
    torch.testing.assert_close(permuted, batch.prefill(fast_runner.ops)[rows], rtol=0, atol=2e-6)


def test_dense_attention_above_the_memory_limit_is_computed_in_pieces(
    monkeypatch: pytest.MonkeyPatch, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    """The dense implementation splits the queries; a tiny limit makes each query its own piece."""
    monkeypatch.setattr("kvscope_kernels.dense_attention._MAX_SCORES", 1)
    batch = build(shape(seq_lens=[40, 33], query_lens=[20, 33], options=OPTIONS["all"]))
    assert_close(paged_prefill(batch), reference(batch))


def paged_prefill(batch: Any) -> Any:
    return paged_prefill_attention_torch(batch.args(), batch.runs)


def test_prefill_attention_of_an_empty_batch_is_empty(runner: Any, shape: Any, build: Any) -> None:
    batch = build(shape(seq_lens=[0, 0], query_lens=[0, 0]), runner.device)
    assert batch.prefill(runner.ops).shape == (0, 6, 64)


def test_prefill_attention_supports_a_strided_query_and_output(
    runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    """Queries are ordered by head, as transformers passes them; the output is every second row of a buffer."""
    batch = build(shape(seq_lens=[17, 5], query_lens=[9, 5]), runner.device)
    by_head = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    buffer = torch.full((28, 6, 64), 7.0, device=runner.device)
    runner.ops.prefill(batch.args(query=by_head, out=buffer[::2]), batch.runs)
    assert_close(buffer[::2], reference(batch))
    assert (buffer[1::2] == 7.0).all()


BAD: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "a query without heads": ("query", lambda b: {"query": b.query[:, 0]}),
    "another head dim": ("query", lambda b: {"query": b.query[..., :32]}),
    "another dtype": ("k_cache", lambda b: {"k_cache": b.k_cache.double()}),
    "an int64 table": ("block_tables", lambda b: {"block_tables": b.block_tables.long()}),
    "starts of another batch": ("query_start", lambda b: {"query_start": b.query_start[:-1]}),
    "int64 starts": ("query_start", lambda b: {"query_start": b.query_start.long()}),
    "a negative window": ("sliding_window", lambda b: {"sliding_window": -4}),
    "a soft cap of zero": ("softcap", lambda b: {"softcap": 0.0}),
    "no queries at most": ("max_query_len", lambda b: {"max_query_len": 0}),
    "a scale of zero": ("scale", lambda b: {"scale": 0.0}),
    "an out of another dtype": ("out", lambda b: {"out": b.query.double()}),
}


@pytest.mark.parametrize("op", [paged_prefill_attention, paged_prefill_attention_torch])
@pytest.mark.parametrize("name", BAD)
def test_prefill_attention_names_an_invalid_argument(name: str, op: Callable[..., Any], shape: Any, build: Any) -> None:
    batch = build(shape(seq_lens=[5, 9], query_lens=[5, 2]))
    argument, change = BAD[name]
    changed = {"query_start": batch.query_start, "max_query_len": 5} | change(batch)
    runs = QueryRuns(changed.pop("query_start"), changed.pop("max_query_len"))
    with pytest.raises(ValueError, match=f"^{argument} is "):
        op(batch.args(**changed), runs)
