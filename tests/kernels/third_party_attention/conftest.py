"""Fakes of libraries that are not installed here: their signatures, computed by the reference."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.dispatch import torch_ops


def reference(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """Compute attention with the parameters of the libraries: a window of -1 or a softcap of 0 means none."""
    left, right = window
    assert (left == -1) == (right == -1)
    assert right in (-1, 0)
    args = AttentionArgs(*(query, *caches, tables, lengths, scale), None if left == -1 else left + 1, softcap or None)
    return torch_ops().prefill(args, QueryRuns(starts, int(starts.diff().max())))


class Wrapper:
    """The used part of FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`."""

    plans = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout in ("NHD", "HND")
        self.layout = kv_layout

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        Wrapper.plans += 1
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert each.dtype == torch.int32
            assert each.dim() == 1
        assert causal
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert q_data_type == kv_data_type
        assert bool((paged_kv_last_page_len >= 1).all())
        assert bool((paged_kv_last_page_len <= page_size).all())
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        counts = paged_kv_indptr.diff()
        self.starts, self.lengths = qo_indptr, (counts - 1) * page_size + paged_kv_last_page_len
        self.tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, begin, count in zip(self.tables, paged_kv_indptr, counts, strict=False):
            row[:count] = paged_kv_indices[begin : begin + count]
        self.options = (sm_scale, (window_left, -1 if window_left < 0 else 0), logits_soft_cap or 0.0)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        keys, values = paged_kv_cache
        if self.layout == "HND":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        num_heads, num_kv_heads, head_dim, page_size = self.shape
        assert q.shape[1:] == (num_heads, head_dim)
        assert keys.shape[1:] == (page_size, num_kv_heads, head_dim)
        return out.copy_(reference(q, (keys, values), self.tables, self.starts, self.lengths, *self.options))


def version_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """Compute `flash_attn_with_kvcache` of FlashAttention 3."""
    assert causal
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    caches = k_cache, v_cache
    return reference(q, caches, page_table, cu_seqlens_q, cache_seqlens, softmax_scale, window_size, softcap)


def version_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Compute `flash_attn_varlen_func` of FlashAttention 2."""
    assert causal
    assert k.shape[1] % 256 == 0
    assert cu_seqlens_k.dtype == torch.int32
    lengths = cu_seqlens_k.diff().to(torch.int32)
    assert max_seqlen_k == int(lengths.max())
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    return reference(q, (k, v), block_table, cu_seqlens_q, lengths, softmax_scale, window_size, softcap)


@pytest.fixture
def fake_libraries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fakes of all three libraries; `Wrapper.plans` counts plans."""
    modules: dict[str, Any] = {
        "flashinfer": SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper),
        "flash_attn_interface": SimpleNamespace(flash_attn_with_kvcache=version_3),
        "flash_attn": SimpleNamespace(flash_attn_varlen_func=version_2),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Wrapper, "plans", 0)
    return SimpleNamespace(modules=modules, wrapper=Wrapper)
