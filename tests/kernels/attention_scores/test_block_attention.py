"""Shares of blocks against a float64 reference: options, lengths, odd blocks, poison, 8 bits, bad input."""

import math
from typing import Any

import pytest
import torch

from kvscope_kernels import ops_for

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
    "int8": {"seq_lens": EDGES, "kv_dtype": torch.int8},
    "fp8": {"seq_lens": EDGES, "kv_dtype": torch.float8_e4m3fn},
}


def expected_shares(batch: Any) -> torch.Tensor:
    """Slow and plain, in float64: a loop over requests, heads and blocks."""
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


def measured(batch: Any, ops: Any, **more: Any) -> torch.Tensor:
    shares = torch.zeros(batch.block_tables.shape, device=batch.query.device)
    ops.block_attention(batch.args(**more), shares)
    return shares


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str, runner: Any, shape: Any, build: Any) -> None:
    batch = build(shape(**CASES[name]), runner.device, seed=len(name))
    found = measured(batch, runner.ops).double().cpu()
    tolerance = 2e-2 if batch.query.dtype == torch.bfloat16 else 2e-5
    assert torch.isfinite(found).all(), "poison leaked"
    assert (found - expected_shares(batch)).abs().max().item() <= tolerance


@pytest.mark.parametrize("name", [*CASES, "sinks"])
def test_decode_adds_the_same(name: str, fast_runner: Any, shape: Any, build: Any) -> None:
    case = CASES.get(name, {"seq_lens": EDGES, "options": {"sinks": True}})
    batch = build(shape(**case), fast_runner.device, seed=len(name))
    shares = torch.ones(batch.block_tables.shape, device=batch.query.device)
    out = fast_runner.ops.decode(batch.args(), shares=shares)
    tolerance = 2e-2 if batch.query.dtype == torch.bfloat16 else 2e-5
    assert (shares.double().cpu() - 1.0 - expected_shares(batch)).abs().max().item() <= tolerance
    assert torch.equal(out, fast_runner.ops.decode(batch.args()))


def test_a_call_adds_one_to_each_request(fast_runner: Any, shape: Any, build: Any) -> None:
    """So layers add up, and their number divides; a request of no tokens stays at nothing."""
    batch = build(shape(seq_lens=[0, 1, 33, 64], options={"sliding_window": 20}), fast_runner.device)
    ops = fast_runner.ops
    total = measured(batch, ops) + measured(batch, ops, max_seq_len=64)
    assert total.sum(1).tolist() == pytest.approx([0.0, 2.0, 2.0, 2.0], abs=1e-5)


def test_large_batches_go_in_parts(runner: Any, shape: Any, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process alone: what is held at once changes nothing."""
    monkeypatch.setattr("kvscope_kernels.attention_scores.block_attention.MAX_PARTIAL_BYTES", 1)
    batch = build(shape(seq_lens=[5, 40, 17]), runner.device)
    found = measured(batch, runner.ops).double().cpu()
    assert (found - expected_shares(batch)).abs().max().item() <= 2e-5


def test_wrong_shares_are_refused(shape: Any, build: Any) -> None:
    batch = build(shape(seq_lens=[5, 40]))
    with pytest.raises(ValueError, match=r"shares is \(2, 3\) float64"):
        ops_for("cpu").block_attention(batch.args(), torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="query"):
        ops_for("cpu").block_attention(batch.args(query=batch.query[:1]), torch.zeros(1, 3))
