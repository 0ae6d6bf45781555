"""Attention of query runs over MLA latents, expanded or absorbed, in any grouping, equals plain attention."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvscope_engine.model.layers.attention.mla import latent_runs
from kvscope_engine.model.layers.attention.mla.latent_runs import (
    attend_runs,
    expanded_bytes,
    heads_at_once,
    is_expanded,
    run_groups,
)
from kvscope_engine.model.layers.attention.mla.latents import Latents
from kvscope_kernels import ops_for
from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.dispatch import torch_ops
from kvscope_kernels.host_lengths import HostLengths

HEADS, CONTENT, ROTARY, LATENT, VALUE = 6, 16, 8, 32, 12


def make_latents(heads: int = HEADS, sizes: tuple[int, ...] = (LATENT, ROTARY, CONTENT, VALUE)) -> Latents:
    latent, rotary, content, value = sizes
    weight = torch.randn(heads * (content + value), latent, generator=torch.Generator().manual_seed(0)) / latent**0.5
    return Latents(
        SimpleNamespace(
            kv_lora_rank=latent,
            qk_rope_head_dim=rotary,
            qk_nope_head_dim=content,
            v_head_dim=value,
            kv_b_proj=SimpleNamespace(weight=weight),
        )
    )


V3 = make_latents(2, (512, 64, 128, 128))


def test_mla_latents_are_expanded_only_if_many_queries_read_them() -> None:
    """DeepSeek V3 expands when the cheaper products of all queries save more than expanding the context costs."""
    assert is_expanded(V3, 400, 400)
    assert not is_expanded(V3, 1, 100_000)
    assert not is_expanded(V3, 150, 100_000)
    assert is_expanded(V3, 200, 100_000)


def test_mla_query_runs_are_grouped_by_expanded_or_absorbed_and_by_size() -> None:
    """Prompts are grouped up to a number of tokens, padded to the longest; short runs are grouped by queries."""

    def rows(*each: tuple[int, int]) -> list[tuple[bool, int, int]]:
        start = np.cumsum([0, *(size for size, _ in each)], dtype=np.int32)
        known = HostLengths(start, np.array([length for _, length in each], np.int32))
        given = QueryRuns(torch.from_numpy(start), 0, known)
        groups = run_groups(V3, torch.from_numpy(known.seq_lens), given, 0)
        return [(group.is_expanded, group.requests.start, group.requests.stop) for group in groups]

    assert rows((20, 20), (30, 30), (9, 9)) == [(True, 0, 3)]
    assert rows((2000, 2000), (2000, 2000), (9, 9)) == [(True, 0, 2), (True, 2, 3)]
    assert rows((2000, 2000), (3000, 9000)) == [(True, 0, 1), (True, 1, 2)]
    assert rows((3, 9000), (100, 9000), (2, 70), (500, 500)) == [(False, 0, 3), (True, 3, 4)]
    assert rows((150, 9000), (150, 9000), (150, 9000), (150, 9000)) == [(False, 0, 3), (False, 3, 4)]


def test_mla_expansion_handles_fewer_heads_at_once_to_bound_its_memory() -> None:
    """Except for a single head of a very long request."""
    many = make_latents(128, (512, 64, 128, 128))
    assert heads_at_once(many, 512, 2) == 128
    assert heads_at_once(many, 8192, 2) == 9
    assert heads_at_once(many, 1 << 20, 2) == 1
    assert expanded_bytes(many, 8192, 2) <= latent_runs.EXPANDED_BYTES + 8192 * 576 * 2


@pytest.mark.parametrize("ops", [ops_for("cpu"), torch_ops()], ids=["compiled", "torch"])
@pytest.mark.parametrize("room", [1 << 26, 40_000, 1], ids=["all heads", "some heads", "one head"])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [
        [(30, 33)],
        [(3, 40), (30, 30)],
        [(50, 61), (2, 9), (1, 80), (40, 200), (4, 4), (30, 31), (20, 20), (40, 90)],
        [(2, 50), (3, 3)],
    ],
    ids=str,
)
def test_runs_of_any_length_equal_plain_attention(
    monkeypatch: pytest.MonkeyPatch, ops: Any, room: int, is_split: bool, lengths: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(latent_runs, "EXPANDED_BYTES", room)
    monkeypatch.setattr(latent_runs, "MAX_GROUPED_QUERIES", 4)
    monkeypatch.setattr(latent_runs, "MAX_EXPANDED_TOKENS", 150)
    latents = make_latents()
    expected_of = make_latents()
    if is_split:
        latents.split()
    draw = torch.Generator().manual_seed(1)
    sizes = [size for size, _ in lengths]
    cuts = [-(-length // 4) for _, length in lengths]
    cache = torch.full((sum(cuts) + 1, 4, 1, latents.stored_dim), math.nan)
    tables = torch.full((len(cuts), max(cuts)), 1 << 30, dtype=torch.int32)
    free = torch.randperm(len(cache), generator=draw).tolist()
    query = torch.randn(sum(sizes), HEADS, latents.key_dim, generator=draw)
    expected = torch.empty(sum(sizes), HEADS, VALUE)
    row = 0
    for request, (size, length) in enumerate(lengths):
        stored = torch.randn(length, latents.stored_dim, generator=draw)
        tables[request, : cuts[request]] = torch.tensor([free.pop() for _ in range(cuts[request])])
        positions = torch.arange(length)
        cache[tables[request, positions // 4].long(), positions % 4, 0] = stored
        keys, values = (each.double() for each in expected_of.expand(stored))
        scores = torch.einsum("qhd,khd->hqk", query[row : row + size].double(), keys) * 0.2
        hidden = positions[None] > torch.arange(length - size, length)[:, None]
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        expected[row : row + size] = torch.einsum("hqk,khd->qhd", weights, values).float()
        row += size
    start, seq_lens = np.cumsum([0, *sizes], dtype=np.int32), np.array([n for _, n in lengths], np.int32)
    given = QueryRuns(torch.from_numpy(start), max(sizes), HostLengths(start, seq_lens))
    for each in (given, given._replace(lengths=None)):
        groups = run_groups(latents, torch.from_numpy(seq_lens), each, int(seq_lens.max()))
        if each.lengths is not None:
            assert [group.rows.start for group in groups] == [0, *(group.rows.stop for group in groups)][:-1]
        args = AttentionArgs(query, cache, cache[..., :LATENT], tables, torch.from_numpy(seq_lens), 0.2)
        found = attend_runs(ops, latents, args._replace(out=torch.full_like(expected, math.nan)), groups, None)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
