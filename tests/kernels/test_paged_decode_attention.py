"""Decode attention equals a float64 reference for all shapes, lengths, options, permutations and invalid inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_kernels.paged_decode_attention import paged_decode_attention, paged_decode_attention_torch

EDGES = [0, 1, 15, 16, 17, 40]  # around a block of 16
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
SMALL: dict[str, dict[str, Any]] = {
    **{name: {"seq_lens": EDGES, "options": options} for name, options in OPTIONS.items()},
    "bf16": {"seq_lens": EDGES, "dtype": torch.bfloat16},
    "bf16 all": {"seq_lens": EDGES, "dtype": torch.bfloat16, "options": OPTIONS["all"]},
    "several splits": {"seq_lens": [300], "num_heads": 3, "num_kv_heads": 1},
    "a split just full": {"seq_lens": [63, 64, 65, 128, 129], "num_heads": 2, "num_kv_heads": 1},
    "more splits than are merged at once": {"seq_lens": [2100], "num_heads": 4, "num_kv_heads": 1},
    "tables as narrow as can be": {
        "seq_lens": [64, 49, 3],
        "options": {"sliding_window": 20},
        "num_spare_columns": 0,
    },
    "splits among short": {"seq_lens": [1, 290, 0, 129], "num_heads": 2, "num_kv_heads": 1},
    "window over splits": {"seq_lens": [310, 7], "num_heads": 2, "num_kv_heads": 1, "options": {"sliding_window": 200}},
    "chunks over splits": {
        "seq_lens": [310, 7, 400, 401, 200],
        "num_heads": 2,
        "num_kv_heads": 1,
        "options": {"sliding_window": 200, "is_chunked": True, "sinks": True},
    },
    "sinks over splits": {"seq_lens": [260, 0, 70], "num_heads": 2, "num_kv_heads": 1, "options": {"sinks": True}},
    "odd block, odd dims": {"seq_lens": [0, 6, 7, 8, 30], "block_size": 7, "head_dim": 80, "value_dim": 48},
    "slots of one": {"seq_lens": [0, 1, 2, 9], "block_size": 1, "layout": "NHD"},
    "group of 8": {"seq_lens": EDGES, "num_heads": 8, "num_kv_heads": 1, "head_dim": 128},
    "group of 1": {"seq_lens": EDGES, "num_heads": 3, "num_kv_heads": 3, "layout": "NHD"},
    "group of 20": {"seq_lens": [17, 0], "num_heads": 20, "num_kv_heads": 1},
}


@pytest.mark.interpreted_in_storms(*({"name": name} for name in (*ONE_OPTION, "bf16")))
@pytest.mark.parametrize("name", SMALL)
def test_decode_attention_equals_the_float64_reference(
    name: str, runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    batch = build(shape(**SMALL[name]), runner.device, seed=len(name))
    assert_close(batch.decode(runner.ops), reference(batch))


@pytest.mark.storm(*ONE_OPTION_ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_attention_of_every_head_shape_equals_the_reference(
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
            seq_lens=[*EDGES, 133],
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            dtype=dtype,
            options=OPTIONS[options],
        ),
        fast_runner.device,
        seed=head_dim,
    )
    assert_close(batch.decode(fast_runner.ops), reference(batch))


@pytest.mark.parametrize("options", OPTIONS)
def test_decode_attention_of_long_and_short_requests_equals_the_reference(
    options: str, fast_runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    lengths = [3000, 1, 17, 1025, 0, 64, 700, 1024, 5, 5, 400]  # different enough to be run in several groups
    batch = build(shape(seq_lens=lengths, options=OPTIONS[options], num_heads=2), fast_runner.device)
    assert_close(batch.decode(fast_runner.ops), reference(batch))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 200])
def test_decode_attention_of_requests_of_equal_length_equals_the_reference(
    length: int, fast_runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    batch = build(shape(seq_lens=[length] * 5, options={"sliding_window": 30}), fast_runner.device)
    assert_close(batch.decode(fast_runner.ops), reference(batch))


def test_decode_attention_does_not_depend_on_the_order_of_requests(fast_runner: Any, shape: Any, build: Any) -> None:
    batch = build(shape(seq_lens=[40, 3, 700, 0, 129, 64, 2000]), fast_runner.device)
    order = torch.tensor([3, 6, 0, 5, 1, 4, 2], device=fast_runner.device)
    permuted = fast_runner.ops.decode(
        batch.args(query=batch.query[order], block_tables=batch.block_tables[order], seq_lens=batch.seq_lens[order])
    )
    torch.testing.assert_close(permuted, batch.decode(fast_runner.ops)[order], rtol=0, atol=2e-6)


def test_requests_without_tokens_give_zeros(runner: Any, shape: Any, build: Any) -> None:
    batch = build(shape(seq_lens=[0, 0, 0], options={"sinks": True}), runner.device)
    assert (batch.decode(runner.ops) == 0).all()


def test_decode_attention_of_an_empty_batch_is_empty(runner: Any, shape: Any, build: Any) -> None:
    batch = build(shape(seq_lens=[]), runner.device)
    assert batch.decode(runner.ops).shape == (0, 6, 64)


def test_decode_attention_supports_a_strided_query_and_output(
    runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    """The query is part of a fused projection, and the output every second row of a buffer."""
    batch = build(shape(seq_lens=[17, 5]), runner.device)
    fused = torch.full((2, 3, 6, 64), float("nan"), device=runner.device)
    fused[:, 1] = batch.query
    buffer = torch.full((4, 6, 64), 7.0, device=runner.device)
    runner.ops.decode(batch.args(query=fused[:, 1], out=buffer[::2]))
    assert_close(buffer[::2], reference(batch))
    assert (buffer[1::2] == 7.0).all()


def test_decode_attention_does_not_depend_on_the_upper_bound_of_lengths(
    runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    """Tight and loose bounds split the work differently, with many empty parts."""
    batch = build(shape(seq_lens=[150, 30], num_heads=2, num_kv_heads=1), runner.device)
    for bound in (150, 400, 5000):
        assert_close(batch.decode(runner.ops, max_seq_len=bound), reference(batch))


def test_bf16_is_as_exact_as_torch(fast_runner: Any, shape: Any, build: Any, reference: Any) -> None:
    batch = build(shape(seq_lens=[500] * 4, dtype=torch.bfloat16), fast_runner.device)
    expected = reference(batch)
    keys, values = (torch.stack(dense).to(torch.bfloat16).transpose(1, 2) for dense in (batch.keys, batch.values))
    rows = batch.query.cpu().view(4, 2, 3, 64)
    theirs = torch.nn.functional.scaled_dot_product_attention(rows, keys, values).view(4, 6, 64)
    ours = batch.decode(fast_runner.ops).cpu()
    assert (ours - expected).abs().max() <= 2 * (theirs - expected).abs().max()


BAD: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "one row too few": ("query", lambda b: {"query": b.query[:-1]}),
    "a whole-number query": ("query", lambda b: {"query": b.query.int()}),
    "heads that do not divide": ("query", lambda b: {"query": b.query[:, :5]}),
    "another head dim": ("query", lambda b: {"query": b.query[..., :32]}),
    "another dtype": ("k_cache", lambda b: {"k_cache": b.k_cache.double()}),
    "a cache of three axes": ("v_cache", lambda b: {"v_cache": b.v_cache[0]}),
    "fewer value blocks": ("v_cache", lambda b: {"v_cache": b.v_cache[1:]}),
    "an int64 table": ("block_tables", lambda b: {"block_tables": b.block_tables.long()}),
    "a table of another batch": ("block_tables", lambda b: {"block_tables": b.block_tables[:1]}),
    "int64 lengths": ("seq_lens", lambda b: {"seq_lens": b.seq_lens.long()}),
    "no window at all": ("sliding_window", lambda b: {"sliding_window": 0}),
    "a soft cap of NaN": ("softcap", lambda b: {"softcap": float("nan")}),
    "too few sinks": ("sinks", lambda b: {"sinks": b.query[0, 1:, 0].contiguous()}),
    "an out of another shape": ("out", lambda b: {"out": b.query[:, 1:]}),
}


@pytest.mark.parametrize("op", [paged_decode_attention, paged_decode_attention_torch])
@pytest.mark.parametrize("name", BAD)
def test_decode_attention_names_an_invalid_argument(name: str, op: Callable[..., Any], shape: Any, build: Any) -> None:
    batch = build(shape(seq_lens=[5, 9]))
    argument, change = BAD[name]
    with pytest.raises(ValueError, match=f"^{argument} is "):
        op(batch.args(**change(batch)))
