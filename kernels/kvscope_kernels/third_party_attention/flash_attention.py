"""FlashAttention over our blocks. Version 3 (Hopper) accepts any block size, version 2 multiples of 256 tokens.

Sources: arXiv 2407.08608, `flash_attn_with_kvcache` of hopper/flash_attn_interface.py; arXiv 2307.08691,
`flash_attn_varlen_func` of flash_attn/flash_attn_interface.py.
"""

from typing import Final

from torch import Tensor
from torch.nn.functional import pad

from kvscope_kernels.third_party_attention.library import (
    SIXTEEN_BITS,
    AttentionShape,
    LibraryMissing,
    OncePerStep,
    Prefill,
    import_library,
    name_with_version,
)

_PAGE_STEP: Final = 256
_MAX_HEAD_DIM: Final = 256


class FlashAttention3:
    """FlashAttention 3 as a `Library`. Raises LibraryMissing if it cannot be imported."""

    def __init__(self) -> None:
        try:
            library = import_library("flash_attn_interface")
        except LibraryMissing:
            library = import_library("flash_attn_3.flash_attn_interface")
        self.name = name_with_version("flash-attn 3", "flash_attn_3")
        self._attend = library.flash_attn_with_kvcache

    def refusal(self, shape: AttentionShape) -> str:
        if not 90 <= shape.capability < 100:
            return "needs compute capability 9"
        return _refusal(shape)

    def prefill(self, batch: Prefill) -> Tensor:
        attended: Tensor = self._attend(
            batch.args.query,
            batch.args.k_cache,
            batch.args.v_cache,
            cache_seqlens=batch.args.seq_lens,
            page_table=batch.args.block_tables,
            cu_seqlens_q=batch.runs.start,
            max_seqlen_q=batch.runs.max_len,
            softmax_scale=batch.args.scale,
            causal=True,
            window_size=_window(batch),
            softcap=batch.args.softcap or 0.0,
        )
        return _copy_to_out(attended, batch)


class FlashAttention2:
    """FlashAttention 2 as a `Library`. Raises LibraryMissing if it cannot be imported."""

    def __init__(self) -> None:
        self._attend = import_library("flash_attn").flash_attn_varlen_func
        self.name = name_with_version("flash-attn", "flash-attn")
        self._key_starts: OncePerStep[Tensor] = OncePerStep()

    def refusal(self, shape: AttentionShape) -> str:
        if shape.capability < 80:
            return "needs compute capability 8"
        if shape.block_size % _PAGE_STEP:
            return f"takes blocks of multiples of {_PAGE_STEP} tokens, not of {shape.block_size}"
        return _refusal(shape)

    def prefill(self, batch: Prefill) -> Tensor:
        starts = self._key_starts.get(batch.runs.start, None, lambda: _key_starts(batch.args.seq_lens))
        attended: Tensor = self._attend(
            batch.args.query,
            batch.args.k_cache,
            batch.args.v_cache,
            cu_seqlens_q=batch.runs.start,
            cu_seqlens_k=starts,
            max_seqlen_q=batch.runs.max_len,
            max_seqlen_k=int(batch.lengths.seq_lens.max()),
            softmax_scale=batch.args.scale,
            causal=True,
            window_size=_window(batch),
            softcap=batch.args.softcap or 0.0,
            block_table=batch.args.block_tables,
        )
        return _copy_to_out(attended, batch)


def _refusal(shape: AttentionShape) -> str:
    if shape.dtype not in SIXTEEN_BITS:
        return "computes in 16 bits"
    if shape.head_dim % 8 or shape.head_dim > _MAX_HEAD_DIM:
        return f"takes heads of up to {_MAX_HEAD_DIM}, not of {shape.head_dim}"
    return ""


def _window(batch: Prefill) -> tuple[int, int]:
    """Return the number of tokens before and after its own that a query attends to; -1 for no limit."""
    return (batch.window_left, -1 if batch.args.sliding_window is None else 0)


def _key_starts(seq_lens: Tensor) -> Tensor:
    return pad(seq_lens.cumsum(0), (1, 0)).to(seq_lens.dtype)


def _copy_to_out(attended: Tensor, batch: Prefill) -> Tensor:
    return attended if batch.args.out is None else batch.args.out.copy_(attended)
