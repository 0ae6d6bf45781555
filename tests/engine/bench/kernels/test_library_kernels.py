"""Peers get the inputs they need and return our results: torch's own for real, libraries through stand-ins."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvscope_engine.bench.kernels import peers
from kvscope_engine.bench.kernels.calls import ExpertsWorkload, decode_call, prefill_call
from kvscope_engine.bench.kernels.contest import OURS, REFERENCE, Absent
from kvscope_engine.bench.kernels.contests import KERNELS, NOT_QUANTIZED, decode, prefill
from kvscope_engine.bench.kernels.samplers import sampler_on
from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.attention_workload import AttentionWorkload, make_pool
from kvscope_kernels.dispatch import ops_for, torch_ops

HEADS: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.float32}
DECODE = AttentionWorkload(name="d", seq_lens=(37, 37), **HEADS)
PREFILL = AttentionWorkload(name="p", seq_lens=(21, 21), query_lens=(21, 21), **HEADS)
CASES = [(DECODE, decode_call), (PREFILL, prefill_call)]


def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Attention in flash-attn's layout: (requests, tokens, heads, head_dim)."""
    parts = (each.transpose(1, 2) for each in (query, keys, values))
    return scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True, scale=scale).transpose(1, 2)


class FakeWrapper:
    """FlashInfer's wrapper: it checks its plan and computes our attention over the same pages."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool = False) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "HND")

    def plan(self, *arguments: Any, causal: bool = False, sm_scale: float, **types: Any) -> None:
        *self.starts, self.pages, self.last, heads, kv_heads, head_dim, page_size = arguments
        assert (heads, kv_heads, head_dim, page_size) == (6, 2, 32, 16)
        self.scale, self.causal = sm_scale, causal

    def run(self, query: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
        page_starts = self.starts[-1].tolist()
        tables = torch.stack([self.pages[a:b] for a, b in pairwise(page_starts)])
        lengths = (16 * (tables.shape[1] - 1) + self.last).to(torch.int32)
        caches = storage[:, 0].transpose(1, 2), storage[:, 1].transpose(1, 2)
        args = AttentionArgs(query, *caches, tables, lengths, self.scale)
        if not self.causal:
            return torch_ops().decode(args)
        return torch_ops().prefill(args, QueryRuns(self.starts[0], 21))


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = SimpleNamespace(
        flash_attn_func=lambda q, k, v, causal, softmax_scale: dense(q, k, v, softmax_scale, causal),
        flash_attn_with_kvcache=lambda q, k, v, cache_seqlens, softmax_scale: dense(q, k, v, softmax_scale, False),
    )
    infer = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FakeWrapper, BatchPrefillWithPagedKVCacheWrapper=FakeWrapper
    )
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    monkeypatch.setitem(sys.modules, "flashinfer", infer)


@pytest.mark.parametrize("peer", [peers.sdpa, peers.flash_attn, peers.flashinfer])
@pytest.mark.parametrize(("work", "call"), CASES)
def test_attention_libraries_return_the_same_result_as_our_kernels(
    work: AttentionWorkload, call: Any, peer: Any, libraries: None
) -> None:
    pool = make_pool(work, "cpu")
    expected = call(torch_ops(), pool)()
    torch.testing.assert_close(peer(work, pool)(), expected, rtol=1e-4, atol=1e-5)


def test_attention_library_that_cannot_run_a_case_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    uneven = AttentionWorkload(name="u", seq_lens=(9, 20), **HEADS)
    chunk = AttentionWorkload(name="c", seq_lens=(20,), query_lens=(4,), **HEADS)
    for work, peer, why in (
        (DECODE, peers.flash_attn, "not installed"),
        (DECODE, peers.flashinfer, "not installed"),
        (DECODE, peers.flex_attention, "compiled only for GPUs"),
        (uneven, peers.sdpa, "only for requests of the same length"),
        (chunk, peers.sdpa, "only for whole prompts"),
    ):
        with pytest.raises(Absent, match=why):
            peer(work, make_pool(work, "cpu"))


def test_every_kernel_operation_has_a_comparison_that_runs() -> None:
    small: dict[str, dict[str, Any]] = {
        "decode": {"works": [DECODE]},
        "prefill": {"works": [PREFILL]},
        "write": {"works": [DECODE]},
        "layer": {"counts": [3]},
        "experts": {"works": [ExpertsWorkload(3, 4, 2, 32, 16)]},
        "products": {"counts": [3], "shape": (64, 96)},
        "copy": {"num_blocks": 2},
        "forms": {"vocabulary": 100},
        "draws": {"vocabulary": 100},
        "heat": {"works": [DECODE]},
    }
    assert small.keys() == KERNELS.keys()
    operations = set()
    for name, make in KERNELS.items():
        for contest in make(ops_for("cpu"), "cpu", torch.float32, **small[name]):
            operations.add(contest.kernel)
            assert contest.num_bytes > 0
            assert {REFERENCE, NOT_QUANTIZED} & {*contest.contenders, *contest.absent}
            for contender in contest.contenders.values():
                contender.calls[0]()
    assert len(operations) == 12


def test_contest_counts_bytes_of_pool_queries_and_results() -> None:
    (found,) = decode(torch_ops(), "cpu", torch.float32, [DECODE])
    assert found.num_bytes == DECODE.kv_bytes + 2 * 2 * 6 * 32 * 4
    assert "is ours" in found.absent[REFERENCE]
    (found,) = prefill(torch_ops(), "cpu", torch.float32, [PREFILL])
    assert found.flops == PREFILL.flops
    assert sampler_on("cpu", found.contenders[OURS])() > 0
