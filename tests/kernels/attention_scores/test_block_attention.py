"""Attention shares of blocks from decode equal a float64 reference for all options, lengths, layouts and dtypes."""

import math
from typing import Any

import pytest
import torch

from kvscope_kernels import ops_for
from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.attention_scores.block_attention import block_attention_torch
from kvscope_kernels.decode import bounds
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.paged_decode_attention import paged_decode_attention

EDGES = [0, 1, 15, 16, 17, 40]
CASES: dict[str, dict[str, Any]] = {
    "plain": {"seq_lens": EDGES},
    "window": {"seq_lens": EDGES, "options": {"sliding_window": 20}},
    "chunks": {"seq_lens": [*EDGES, 39, 60], "options": {"sliding_window": 20, "is_chunked": True}},
    "softcap": {"seq_lens": EDGES, "options": {"softcap": 2.0}},
    "bf16": {"seq_lens": EDGES, "dtype": torch.bfloat16},
    "several tiles": {"seq_lens": [300, 2, 129], "num_heads": 3, "num_kv_heads": 1},
    "odd block, odd dims": {"seq_lens": [0, 6, 7, 8, 30], "block_size": 7, "head_dim": 80, "layout": "NHD"},
    "slots of one": {"seq_lens": [0, 1, 2, 70], "block_size": 1},
    "blocks of more than a tile": {"seq_lens": [150, 3], "block_size": 96, "head_dim": 128},
    "sinks": {"seq_lens": EDGES, "options": {"sinks": True}},
    "small blocks": {"seq_lens": EDGES, "block_size": 8},
    "pieces of blocks": {"seq_lens": [150, 3, 64, 65], "block_size": 64, "head_dim": 128},
    "pieces of blocks, window": {
        "seq_lens": [150, 3, 64, 300],
        "block_size": 64,
        "head_dim": 128,
        "options": {"sliding_window": 100},
    },
    "several parts": {"seq_lens": [1100, 3, 900], "options": {"sliding_window": 1011, "sinks": True}},
    "several parts of odd blocks": {"seq_lens": [600, 0, 130], "block_size": 24, "num_heads": 2, "num_kv_heads": 1},
    "int8": {"seq_lens": EDGES, "kv_dtype": torch.int8},
    "fp8": {"seq_lens": EDGES, "kv_dtype": torch.float8_e4m3fn},
}


def expected_shares(batch: Any) -> torch.Tensor:
    """Return the shares calculated slowly in float64: a loop over requests, heads and blocks."""
    window, softcap = batch.options.get("sliding_window"), batch.options.get("softcap")
    block_size, num_kv_heads = batch.k_cache.shape[1:3]
    shares = torch.zeros(batch.block_tables.shape, dtype=torch.float64)
    num_heads = batch.query.shape[1]
    for request, keys in enumerate(batch.keys):
        last = max(len(keys) - 1, 0)
        first = max(0, last - (last % window if batch.options.get("is_chunked") else window - 1)) if window else 0
        for head in range(num_heads if len(keys) else 0):
            query = batch.query[request, head].double().cpu()
            scores = keys[:, head // (num_heads // num_kv_heads)] @ query * batch.scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores[:first] = -math.inf
            for position, weight in enumerate(scores.softmax(0).tolist()):
                shares[request, position // block_size] += weight / num_heads
    return shares


def tolerance_of(batch: Any) -> float:
    return 2e-2 if batch.query.dtype == torch.bfloat16 else 2e-5


@pytest.mark.parametrize("name", CASES)
def test_decode_attention_returns_block_shares_without_changing_its_result(
    name: str, runner: Any, shape: Any, build: Any
) -> None:
    batch = build(shape(**CASES[name]), runner.device, seed=len(name))
    shares, out = torch.ones(batch.block_tables.shape, device=runner.device), batch.poisoned_out()
    runner.ops.decode(batch.args(out=out), shares=shares)
    assert torch.isfinite(shares).all(), "poison leaked"
    assert (shares.double().cpu() - 1.0 - expected_shares(batch)).abs().max().item() <= tolerance_of(batch)
    plain = runner.ops.decode(batch.args(out=batch.poisoned_out()))
    begins_with_blocks = 16 % batch.k_cache.shape[1] == 0 and "sliding_window" not in batch.options
    assert torch.equal(out, plain) if begins_with_blocks else (out - plain).abs().max() <= tolerance_of(batch)


@pytest.mark.parametrize("name", CASES)
def test_torch_block_attention_shares_equal_the_float64_reference(name: str, shape: Any, build: Any) -> None:
    batch = build(shape(**CASES[name]), seed=len(name))
    found = torch.zeros(batch.block_tables.shape)
    block_attention_torch(batch.args(), found)
    assert (found - expected_shares(batch)).abs().max().item() <= tolerance_of(batch)


def test_attention_shares_of_each_request_add_up_to_one_per_call(fast_runner: Any, shape: Any, build: Any) -> None:
    """Shares of layers are summed; a request without tokens keeps zeros."""
    batch = build(shape(seq_lens=[0, 1, 33, 64], options={"sliding_window": 20}), fast_runner.device)
    total = torch.zeros(batch.block_tables.shape, device=fast_runner.device)
    for more in ({}, {"max_seq_len": 64}):
        fast_runner.ops.decode(batch.args(**more), shares=total)
    assert total.sum(1).tolist() == pytest.approx([0.0, 2.0, 2.0, 2.0], abs=1e-5)


def decode_in_poison(args: AttentionArgs, shares: list[torch.Tensor], max_sum_bytes: int) -> None:
    """Run layers of a step, one for each of `shares`, with this much room for sums; new memory holds NaN. It runs
    where kernels do.
    """
    new_empty = torch.Tensor.new_empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = new_empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made.fill_(1 << 30)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", poisoned)
        patch.setattr(bounds, "MAX_SUM_BYTES", max_sum_bytes)
        plans = DecodePlans()
        for of_layer in shares:
            paged_decode_attention(args, plans, of_layer)


@pytest.mark.interpreter
@pytest.mark.parametrize("block_size", [16, 64])
def test_attention_shares_of_layers_add_up_despite_uninitialized_memory(
    block_size: int, interpret: Any, shape: Any, build: Any
) -> None:
    batch = build(shape(seq_lens=[900, 40, 0, 17], block_size=block_size, num_heads=4))
    total, once = (torch.zeros(batch.block_tables.shape) for _ in range(2))
    interpret(decode_in_poison, batch.args(), [total, once, total], 1 << 20)
    assert (once - expected_shares(batch)).abs().max().item() <= 2e-5
    assert torch.equal(total, once + once), "the runs differ"


@pytest.mark.interpreter
def test_requests_above_the_memory_limit_get_no_attention_shares(interpret: Any, shape: Any, build: Any) -> None:
    batch = build(shape(seq_lens=[100, 300, 20], num_heads=4))
    shares, expected = torch.zeros(batch.block_tables.shape), expected_shares(batch)
    interpret(decode_in_poison, batch.args(), [shares], 4 * 4 * (7 + 18))
    assert (shares[0] - expected[0]).abs().max().item() <= 2e-5
    assert not shares[1:].any(), "only the first 7 blocks have room, but later requests got shares"


def test_invalid_tensor_for_attention_shares_is_refused(shape: Any, build: Any) -> None:
    batch = build(shape(seq_lens=[5, 40]))
    with pytest.raises(ValueError, match=r"shares is \(2, 3\) float64"):
        ops_for("cpu").decode(batch.args(), shares=torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="query"):
        ops_for("cpu").decode(batch.args(query=batch.query[:1]), shares=torch.zeros(1, 4))
