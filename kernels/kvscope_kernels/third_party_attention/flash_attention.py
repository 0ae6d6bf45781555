"""FlashAttention over our blocks: version 3 (Hopper) accepts any block size, version 2 multiples of 256 tokens.

Sources: arXiv 2407.08608, `flash_attn_with_kvcache` of hopper/flash_attn_interface.py; arXiv 2307.08691,
`flash_attn_varlen_func` of flash_attn/flash_attn_interface.py.
"""

from typing import Final

from torch import Tensor
from torch.nn.functional import pad

from kvscope_kernels.third_party_attention.library import (
    SIXTEEN_BITS,
    AttentionShape,
    Missing,
    OncePerStep,
    Prefill,
    module,
    named,
)

_PAGE_STEP: Final = 256
_MAX_HEAD_DIM: Final = 256


class FlashAttention3:
    """FlashAttention 3 as a `Library`. Raises Missing if it cannot be imported."""

    def __init__(self) -> None:
        try:
            library = module("flash_attn_interface")
        except Missing:
            library = module("flash_attn_3.flash_attn_interface")
        self.name = named("flash-attn 3", "flash_attn_3")
        self._attend = library.flash_attn_with_kvcache

    def refusal(self, shape: AttentionShape) -> str:
        if not 90 <= shape.capability < 100:
            return "needs compute capability 9"
        return _refusal(shape)

    def prefill(self, given: Prefill) -> Tensor:
        found: Tensor = self._attend(
            given.args.query,
            given.args.k_cache,
            given.args.v_cache,
            cache_seqlens=given.args.seq_lens,
            page_table=given.args.block_tables,
            cu_seqlens_q=given.runs.start,
            max_seqlen_q=given.runs.max_len,
            softmax_scale=given.args.scale,
            causal=True,
            window_size=_window(given),
            softcap=given.args.softcap or 0.0,
        )
        return _placed(found, given)


class FlashAttention2:
    """FlashAttention 2 as a `Library`. Raises Missing if it cannot be imported."""

    def __init__(self) -> None:
        self._attend = module("flash_attn").flash_attn_varlen_func
        self.name = named("flash-attn", "flash-attn")
        self._starts: OncePerStep[Tensor] = OncePerStep()

    def refusal(self, shape: AttentionShape) -> str:
        if shape.capability < 80:
            return "needs compute capability 8"
        if shape.block_size % _PAGE_STEP:
            return f"takes blocks of multiples of {_PAGE_STEP} tokens, not of {shape.block_size}"
        return _refusal(shape)

    def prefill(self, given: Prefill) -> Tensor:
        starts = self._starts.get(given.runs.start, None, lambda: _starts(given.args.seq_lens))
        found: Tensor = self._attend(
            given.args.query,
            given.args.k_cache,
            given.args.v_cache,
            cu_seqlens_q=given.runs.start,
            cu_seqlens_k=starts,
            max_seqlen_q=given.runs.max_len,
            max_seqlen_k=int(given.lengths.seq_lens.max()),
            softmax_scale=given.args.scale,
            causal=True,
            window_size=_window(given),
            softcap=given.args.softcap or 0.0,
            block_table=given.args.block_tables,
        )
        return _placed(found, given)


def _refusal(shape: AttentionShape) -> str:
    if shape.dtype not in SIXTEEN_BITS:
        return "computes in 16 bits"
    if shape.head_dim % 8 or shape.head_dim > _MAX_HEAD_DIM:
        return f"takes heads of up to {_MAX_HEAD_DIM}, not of {shape.head_dim}"
    return ""


def _window(given: Prefill) -> tuple[int, int]:
    """Return the number of tokens before and after its own that a query sees; -1: all."""
    return (given.window_left, -1 if given.args.sliding_window is None else 0)


def _starts(seq_lens: Tensor) -> Tensor:
    return pad(seq_lens.cumsum(0), (1, 0)).to(seq_lens.dtype)


def _placed(found: Tensor, given: Prefill) -> Tensor:
    return found if given.args.out is None else given.args.out.copy_(found)
