"""Prefill with `QueryRuns.is_fixed`: a query has the same bits in every batch, however its prompt is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns

INTERPRETER = pytest.param("interpreter", marks=pytest.mark.interpreter)
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
LENGTH = 97
"""Length of a prompt: longer than several tiles of keys, and no multiple of any."""
ONE_KV_HEAD = {"num_heads": 3, "num_kv_heads": 1}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": torch.bfloat16},
    "bf16, wide heads": {"dtype": torch.bfloat16, "head_dim": 128, "num_heads": 4},
    "fp16": {"dtype": torch.float16},
    "window": {"options": {"sliding_window": 21, "sinks": True}},
    "bf16 window": {"dtype": torch.bfloat16, "options": {"sliding_window": 37}},
    "chunks": {"options": {"sliding_window": 30, "is_chunked": True}},
    "softcap and sinks": {"dtype": torch.bfloat16, "options": {"softcap": 2.0, "sinks": True}},
    "odd block, odd dims": {"block_size": 7, "head_dim": 80, "value_dim": 48},
}
CUTS = ([97], [1, 96], [90, *[1] * 7], [40, 33, 24])
"""Consecutive runs of a prompt."""


@pytest.mark.interpreted_in_storms({"name": "fp16"}, {"name": "bf16 window"})
@pytest.mark.parametrize("runner", [INTERPRETER, GPU], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_fixed_prefill_gives_a_query_the_same_bits_in_every_chunk_and_batch(
    name: str, runner: Any, shape: Any, build: Any
) -> None:
    """A prompt runs at once, in runs of several lengths, as decodes, and beside others that come first or are
    longer.
    """
    batch = whole_batch(name, runner, shape, build)
    args, start = batch.args(), batch.query_start.tolist()
    alone = run(runner, args, [(1, 0, LENGTH)], start)
    for cut in CUTS:
        ends = torch.tensor(cut).cumsum(0).tolist()
        pieces = [(1, end - size, end) for size, end in zip(cut, ends, strict=True)]
        found = torch.cat([run(runner, args, [piece], start) for piece in pieces])
        assert torch.equal(bits(found), bits(alone)), f"in runs of {cut}"
    beside = [(0, 0, 18), (1, 50, LENGTH), (2, 100, 150), (0, 18, 19)]
    found = run(runner, args, beside, start)[18 : 18 + LENGTH - 50]
    assert torch.equal(bits(found), bits(alone[50:])), "a query depends on other requests"


@pytest.mark.interpreted_in_storms({"name": "fp16"}, {"name": "bf16 window"})
@pytest.mark.parametrize("runner", [INTERPRETER, GPU], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_fixed_prefill_attention_equals_the_float64_reference(
    name: str, runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    """Only last tokens are computed: blocks before their windows were freed."""
    lengths = {"seq_lens": [19, LENGTH, 150, 0], "query_lens": [1, 40, 23, 0]}
    batch = build(shape(**(lengths | ONE_KV_HEAD | CASES[name])), runner.device, seed=len(name))
    runs = batch.runs._replace(is_fixed=True)
    assert_close(runner.ops.prefill(batch.args(out=batch.poisoned_out()), runs), reference(batch))


def whole_batch(name: str, runner: Any, shape: Any, build: Any) -> Any:
    """Return three prompts, computed from their beginnings."""
    lengths = {"seq_lens": [19, LENGTH, 150], "query_lens": [19, LENGTH, 150]}
    return build(shape(**(lengths | ONE_KV_HEAD | CASES[name])), runner.device, seed=len(name))


def run(runner: Any, args: AttentionArgs, pieces: list[tuple[int, int, int]], start: list[int]) -> torch.Tensor:
    """Compute pieces of prompts: which prompt, from which token to which. Blocks hold whole prompts, but tokens after
    a piece must not be visible.
    """
    device = args.query.device
    sizes = torch.tensor([0, *(end - begin for _, begin, end in pieces)], dtype=torch.int32)
    given = args._replace(
        query=torch.cat([args.query[start[which] + begin : start[which] + end] for which, begin, end in pieces]),
        block_tables=args.block_tables[[which for which, _, _ in pieces]],
        seq_lens=torch.tensor([end for _, _, end in pieces], dtype=torch.int32, device=device),
    )
    given = given._replace(out=torch.full_like(given.out_or_new(), torch.nan))
    runs = QueryRuns(sizes.cumsum(0, dtype=torch.int32).to(device), int(sizes.max()), is_fixed=True)
    out: torch.Tensor = runner.ops.prefill(given, runs)
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of the numbers: equal bits are needed, not only 0 == -0."""
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
