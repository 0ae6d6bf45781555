"""Attention of other libraries on the same queries, keys and values, for comparison with kvscope's kernels.

Each function raises `Absent` if its library cannot run here, or an exception of the library. Libraries without paged
attention get contiguous keys and values per request, copied before the timing starts. Results have the shapes of
kvscope's kernels.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvscope_engine.bench.kernels.contest import Absent
from kvscope_kernels.attention_workload import AttentionWorkload, Pool
from kvscope_kernels.graph_timing import Call
from kvscope_kernels.third_party_attention.flash_attention import FlashAttention2, FlashAttention3
from kvscope_kernels.third_party_attention.library import Library, LibraryMissing
from kvscope_kernels.third_party_attention.library_choice import prefill_of
from kvscope_kernels.third_party_attention.prefill_with_fallback import shape_of

Peer = Callable[[AttentionWorkload, Pool], Call]
_MAX_COMPILED_SHAPES: Final = 64
_WORKSPACE_BYTES: Final = 256 << 20  # recommended by FlashInfer's documentation


def sdpa(work: AttentionWorkload, pool: Pool) -> Call:
    keys, values = (each.transpose(1, 2) for each in contiguous_kv(work, pool))
    if work.query_lens is None:  # query heads of one KV head are rows of one product: nothing is read twice
        rows = pool.query.view(len(work.seq_lens), work.num_kv_heads, -1, work.head_dim)
        return lambda: scaled_dot_product_attention(rows, keys, values, scale=pool.scale).view_as(pool.query)
    query = _whole_prompts(work, pool).transpose(1, 2)
    attend = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True, scale=pool.scale)
    return lambda: attend(query, keys, values).transpose(1, 2).reshape(pool.query.shape)


def flex_attention(work: AttentionWorkload, pool: Pool) -> Call:
    """Return a call of torch's flex_attention, compiled for the workload. GPU only, because compilation for a CPU takes
    too long.
    """
    if pool.query.device.type != "cuda":
        raise Absent("compiled only for GPUs")
    from torch.nn.attention import flex_attention as flex

    keys, values = (each.transpose(1, 2) for each in contiguous_kv(work, pool))
    compiled = _compiled_flex()
    batch, length = len(work.seq_lens), work.seq_lens[0]
    mask = None
    query = pool.query.view(batch, -1, work.num_heads, work.head_dim).transpose(1, 2)
    if work.query_lens is not None:
        query = _whole_prompts(work, pool).transpose(1, 2)
        mask = flex.create_block_mask(_is_before, None, None, length, length, device=pool.query.device.type)
    attend = partial(compiled, block_mask=mask, scale=pool.scale, enable_gqa=True)
    return lambda: attend(query, keys, values).transpose(1, 2).reshape(pool.query.shape)


def flash_attn(work: AttentionWorkload, pool: Pool) -> Call:
    """Return a call of FlashAttention-2 on contiguous keys and values. Paged keys and values are not used,
    because FlashAttention-2 needs pages of at least 256 tokens.
    """
    library = _import_library("flash_attn")
    keys, values = contiguous_kv(work, pool)
    if work.query_lens is None:
        attend = partial(library.flash_attn_with_kvcache, cache_seqlens=pool.seq_lens, softmax_scale=pool.scale)
        query = pool.query[:, None]
        return lambda: attend(query, keys, values).view_as(pool.query)
    attend = partial(library.flash_attn_func, causal=True, softmax_scale=pool.scale)
    query = _whole_prompts(work, pool)
    return lambda: attend(query, keys, values).view_as(pool.query)


def flash_attn_paged(work: AttentionWorkload, pool: Pool) -> Call:
    """Return a prefill call of the newest installed FlashAttention version that accepts kvscope's block layout.

    The call uses the same wrapper as an engine with the option `--attention-backend`.
    """
    if work.query_lens is None:
        raise Absent("used for prefill only")
    if work.kv_dtype is not None:
        raise Absent("no support for 8-bit caches")
    refusals = []
    for name, make in (("version 3", FlashAttention3), ("version 2", FlashAttention2)):
        try:
            library: Library = make()
            if why := library.refusal(shape_of(pool.query, pool.k_cache)):
                raise LibraryMissing(why)
        except LibraryMissing as missing:
            refusals.append(f"{name}: {missing}")
        else:
            return partial(library.prefill, prefill_of(work, pool))
    raise Absent("; ".join(refusals))


def flashinfer(work: AttentionWorkload, pool: Pool) -> Call:
    """Return a call of FlashInfer on kvscope's block pool. FlashInfer's planning, which an engine does once per step,
    is not timed.
    """
    library = _import_library("flashinfer")
    if work.kv_dtype is not None:
        raise Absent("no support for a scale per token")
    workspace = _workspace(pool.query.device)
    blocks = (pool.seq_lens + work.block_size - 1) // work.block_size
    starts = torch.nn.functional.pad(blocks.cumsum(0), (1, 0)).to(torch.int32)
    width = torch.arange(pool.block_tables.shape[1], device=blocks.device)
    indices = pool.block_tables[width < blocks[:, None]]
    last = (pool.seq_lens - 1) % work.block_size + 1
    shape = work.num_heads, work.num_kv_heads, work.head_dim, work.block_size
    types = {"q_data_type": work.dtype, "kv_data_type": work.dtype, "sm_scale": pool.scale}
    if work.query_lens is None:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(starts, indices, last, *shape, **types)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(pool.query_start, starts, indices, last, *shape, causal=True, **types)
    return partial(wrapper.run, pool.query, pool.storage)


PEERS: Final[dict[str, Peer]] = {
    "SDPA, contiguous": sdpa,
    "flex_attention, contiguous": flex_attention,
    "FlashInfer, paged": flashinfer,
    "flash-attn, contiguous": flash_attn,
    "flash-attn, paged": flash_attn_paged,
}


def peer_versions() -> dict[str, str]:
    versions = {}
    for name in ("flashinfer-python", "flash-attn"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def contiguous_kv(work: AttentionWorkload, pool: Pool) -> tuple[Tensor, Tensor]:
    """Return keys and values of shape (requests, tokens, num_kv_heads, head_dim), copied out of their blocks.

    Raises Absent for requests of different lengths and for 8-bit caches.
    """
    if len(set(work.seq_lens)) > 1:
        raise Absent("only for requests of the same length")
    if work.kv_dtype is not None:
        raise Absent("no support for 8-bit caches")
    shape = len(work.seq_lens), -1, work.num_kv_heads, work.head_dim
    length = work.seq_lens[0]
    tables = pool.block_tables.to(torch.int64)
    keys, values = (cache[tables].reshape(shape)[:, :length].contiguous() for cache in (pool.k_cache, pool.v_cache))
    return keys, values


def _whole_prompts(work: AttentionWorkload, pool: Pool) -> Tensor:
    """Return queries of shape (requests, tokens, num_heads, head_dim).

    All prompts must have the same length, which `contiguous_kv` checks before. Raises Absent, which leaves the peer out
    of the comparison, if some requests compute only a part of their prompt.
    """
    if work.query_lens != work.seq_lens:
        raise Absent("only for whole prompts")
    return pool.query.view(len(work.seq_lens), -1, work.num_heads, work.head_dim)


def _import_library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = getattr(error, "name", None) == name
        raise Absent("not installed" if missing else f"cannot be imported: {error}") from None


@cache
def _workspace(device: torch.device) -> Tensor:
    """Return FlashInfer's workspace of `device`, shared by all calls because they run one after another."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@cache
def _compiled_flex() -> Any:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention as attend

    config.recompile_limit = max(
        config.recompile_limit, _MAX_COMPILED_SHAPES
    )  # beyond the limit, flex_attention runs uncompiled
    return torch.compile(attend, dynamic=False)


def _is_before(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
