"""Bounds of blocks, and the shares estimated from them, equal a loop for all lengths, layouts and dtypes."""

import math
from typing import Any

import pytest
import torch

from kvscope_kernels import ops_for
from kvscope_kernels.attention_scores.block_scores import NEAR

EDGES, FP8 = [0, 1, 15, 16, 17, 40], torch.float8_e4m3fn
CASES: dict[str, dict[str, Any]] = {
    "plain": {"seq_lens": EDGES},
    "bf16": {"seq_lens": EDGES, "dtype": torch.bfloat16},
    "several tiles of blocks": {"seq_lens": [1100, 2, 129], "num_heads": 3, "num_kv_heads": 1, "head_dim": 16},
    "odd block, odd dims": {"seq_lens": [0, 6, 7, 8, 30], "block_size": 7, "head_dim": 80, "layout": "NHD"},
    "slots of one": {"seq_lens": [0, 1, 2, 20], "block_size": 1},
    "blocks of more than a tile": {"seq_lens": [150, 3], "block_size": 96, "head_dim": 128},
    "int8": {"seq_lens": EDGES, "kv_dtype": torch.int8},
    "e4m3, odd block, heads last": {"seq_lens": [0, 6, 30], "block_size": 7, "kv_dtype": FP8, "layout": "NHD"},
}


def empty_bounds(batch: Any) -> torch.Tensor:
    num_blocks, _, heads, dim = batch.k_cache.shape
    return batch.query.new_full((num_blocks, 2, heads, dim), math.nan)


def slots_of(batch: Any, begin: list[int], end: list[int]) -> torch.Tensor:
    """Return the slots of positions [begin, end) of each request, one request after the other."""
    block_size, tables = batch.k_cache.shape[1], batch.block_tables.cpu()
    found = [
        int(tables[request, position // block_size]) * block_size + position % block_size
        for request, span in enumerate(zip(begin, end, strict=True))
        for position in range(*span)
    ]
    return torch.tensor(found, dtype=torch.int64, device=batch.query.device)


def written_bounds(batch: Any, ops: Any) -> torch.Tensor:
    """Write in two steps: all but the last three tokens of each request, then these; the first step ends with
    padding.
    """
    bounds, lengths = empty_bounds(batch), [len(keys) for keys in batch.keys]
    cuts = [max(0, length - 3) for length in lengths]
    first = slots_of(batch, [0] * len(cuts), cuts)
    scale = batch.options.get("k_scale")
    ops.block_bounds(batch.k_cache, bounds, torch.cat((first, first.new_full((2,), -1))), scale)
    ops.block_bounds(batch.k_cache, bounds, slots_of(batch, cuts, lengths), scale)
    return bounds


def expected_bounds(batch: Any) -> torch.Tensor:
    bounds, block_size = empty_bounds(batch).cpu().double(), batch.k_cache.shape[1]
    for request, keys in enumerate(batch.keys):
        for column, part in enumerate(keys.split(block_size)):
            if len(part):
                block = batch.block_tables[request, column]
                bounds[block, 0], bounds[block, 1] = part.amin(0), part.amax(0)
    return bounds


@pytest.mark.parametrize("name", CASES)
def test_block_key_bounds_equal_the_extremes_of_the_written_keys(
    name: str, runner: Any, shape: Any, build: Any
) -> None:
    batch = build(shape(**CASES[name]), runner.device, seed=len(name))
    found = written_bounds(batch, runner.ops).cpu()
    expected = expected_bounds(batch).to(found.dtype)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), (
        "bounds differ, or are not NaN where nothing was written"
    )


@pytest.mark.parametrize("name", CASES)
def test_block_scores_equal_the_attention_estimated_from_key_bounds(
    name: str, runner: Any, shape: Any, build: Any
) -> None:
    softcap = 4.0 if name == "bf16" else None
    batch = build(shape(**CASES[name]), runner.device, seed=len(name))
    bounds = expected_bounds(batch).to(batch.query.dtype).to(runner.device)
    block_size, heads = batch.k_cache.shape[1:3]
    given = (batch.query, bounds, batch.block_tables, batch.seq_lens)
    options = {"block_size": block_size, "scale": batch.scale, "softcap": softcap}
    found = runner.ops.block_scores(*given, **options).cpu().double()
    assert found.shape == (len(batch.keys), heads, batch.block_tables.shape[1])
    assert not torch.isnan(found).any(), "poison leaked"
    slack = 1e-4 if batch.query.dtype == torch.float32 else 3e-2
    for request, keys in enumerate(batch.keys):
        rows = batch.query[request].cpu().double().view(heads, -1, keys.shape[-1])
        parts = keys.split(block_size) if len(keys) else ()
        estimates = []
        for part in parts:
            low, high = part.amin(0)[:, None], part.amax(0)[:, None]
            near, far = torch.maximum(rows * low, rows * high), torch.minimum(rows * low, rows * high)
            estimates.append((NEAR * near + (1 - NEAR) * far).sum(-1) * batch.scale)
        if parts:
            each = torch.stack(estimates, -1)
            each = each if softcap is None else softcap * (each / softcap).tanh()
            expected = each.softmax(-1).sum(1).log()
            assert (found[request, :, : len(parts)] - expected).abs().max() <= slack
        assert torch.isinf(found[request, :, len(parts) :]).all()
        assert (found[request, :, len(parts) :] < 0).all()


def test_block_scores_have_only_as_many_blocks_as_the_maximum_length_needs(
    fast_runner: Any, shape: Any, build: Any
) -> None:
    batch = build(shape(seq_lens=[40, 3]), fast_runner.device)
    bounds = expected_bounds(batch).to(batch.query.dtype).to(fast_runner.device)
    given = (batch.query, bounds, batch.block_tables, batch.seq_lens)
    options = {"block_size": 16, "scale": 0.1}
    whole = fast_runner.ops.block_scores(*given, **options)
    assert torch.equal(fast_runner.ops.block_scores(*given, **options, max_seq_len=40), whole[..., :3])
    assert fast_runner.ops.block_scores(*given, **options, max_seq_len=0).shape[2] == 0


def test_invalid_tensors_for_block_bounds_and_scores_are_refused(shape: Any, build: Any) -> None:
    batch, ops = build(shape(seq_lens=[5, 40])), ops_for("cpu")
    bounds, slots = empty_bounds(batch), slots_of(batch, [0, 0], [5, 40])
    with pytest.raises(ValueError, match=r"bounds is \(7, 2, 2, 64\) float64"):
        ops.block_bounds(batch.k_cache, bounds.double(), slots[:0])
    with pytest.raises(ValueError, match="slot_mapping"):
        ops.block_bounds(batch.k_cache, bounds, slots.int())
    with pytest.raises(ValueError, match="k_scale is None"):
        ops.block_bounds(batch.k_cache.to(torch.int8), bounds, slots)
    with pytest.raises(ValueError, match="query"):
        ops.block_scores(batch.query[..., :8], bounds, batch.block_tables, batch.seq_lens, block_size=16, scale=1.0)
    with pytest.raises(ValueError, match="seq_lens"):
        ops.block_scores(batch.query, bounds, batch.block_tables, batch.seq_lens[:1], block_size=16, scale=1.0)


def test_block_scores_of_a_batch_split_into_parts_equal_the_unsplit_ones(
    runner: Any, shape: Any, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of a part does not change the result; this runs in this process only."""
    batch = build(shape(seq_lens=[5, 40, 17]), runner.device)
    given = (batch.query, expected_bounds(batch).float().to(runner.device), batch.block_tables, batch.seq_lens)
    whole = ops_for("cpu").block_scores(*(each.cpu() for each in given), block_size=16, scale=0.1)
    monkeypatch.setattr("kvscope_kernels.attention_scores.block_scores.MAX_PARTIAL_BYTES", 1)
    found = runner.ops.block_scores(*given, block_size=16, scale=0.1).cpu()
    assert torch.allclose(found, whole, atol=1e-4)
