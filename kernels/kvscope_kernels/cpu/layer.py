"""Runs a decoder layer for a batch of decodes in one call, from layer.c, bit-identical to the single operations.

This saves the time between these operations. Decides which layers and steps are supported; callers run the single
operations for others.
"""

import ctypes
from collections.abc import Sequence
from ctypes import addressof
from typing import NamedTuple

import torch
from torch import Tensor

from kvscope_kernels.cpu.grouped import NativeGrouped
from kvscope_kernels.cpu.layers import MAX_ELEMENTS_PER_CALL
from kvscope_kernels.cpu.library import (
    DecodeStruct,
    LayerStruct,
    NormStruct,
    ProductStruct,
    StepStruct,
    library,
    library_refusal,
)
from kvscope_kernels.cpu.linear import Int8Weight
from kvscope_kernels.cpu.operand_types import DTYPES, cache_refusal, dtype_refusal
from kvscope_kernels.rotate_write import CosSin

Weight = Int8Weight | NativeGrouped
"""Types of weights whose C functions have the same signature."""


class Norm(NamedTuple):
    """RMSNorm over the hidden dimension or over heads."""

    weight: Tensor
    """(hidden,) float32, contiguous, unless stated otherwise."""
    eps: float


class LayerSpec(NamedTuple):
    """Weights and options of a layer: attention and a gated feed-forward block, each with a norm before and a residual
    sum after it.
    """

    products: Sequence[Weight]
    """Weights of the four linear layers, in this order: fused q, k and v; attention output; fused gate and up; down."""
    norms: tuple[Norm, Norm, Norm | None]
    """Norms before attention, before the feed-forward block, and before the next layer. The last is None if
    there is no next layer.
    """
    head_norm: Norm | None
    """Norm of each query and key head before rotation, with a weight of shape (num_heads + num_kv_heads,
    head_dim); None for a model without it.
    """
    activation: int
    """Key of `gated_activation.ACTIVATIONS`."""
    num_heads: int
    num_kv_heads: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None
    """(num_heads,) float32, contiguous; None for a model without attention sinks."""
    is_chunked: bool
    dtype: torch.dtype
    """Dtype of activations and of the KV cache."""
    sum_dtype: torch.dtype
    """Dtype of the residual stream, the layer's input and output."""


class DecodeStep:
    """A batch of decodes, one token per request, shared by all layers. The tensors must not change while it is used.

    Args:
        cos_sin: Rotation of the tokens, (T, 1, head_dim) each.
        slot_mapping: (T,) int64.
        block_tables: (T, blocks) int32.
        seq_lens: (T,) int32.
        shares: None, or (T, blocks) float32, to which each layer adds the shares of `block_attention_torch`.
    """

    def __init__(
        self,
        cos_sin: CosSin,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        shares: Tensor | None = None,
    ) -> None:
        self.num_tokens = len(slot_mapping)
        self.dtype, self.head_dim = cos_sin.cos.dtype, cos_sin.cos.shape[-1]
        self.tensors = (cos_sin, slot_mapping, block_tables, seq_lens)
        self._shares = shares
        self.struct = StepStruct(
            cos=cos_sin.cos.data_ptr(),
            sin=cos_sin.signed_sin.data_ptr(),
            slots=slot_mapping.data_ptr(),
            tables=block_tables.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            tokens=self.num_tokens,
            turn_stride=cos_sin.cos.stride(0),
            table_stride=block_tables.stride(0),
            threads=torch.get_num_threads(),
            shares=None if shares is None else shares.data_ptr(),
            shares_stride=0 if shares is None else shares.stride(0),
        )
        self.address = addressof(self.struct)

    @property
    def has_supported_layout(self) -> bool:
        """Whether the tensors have the layout and dtypes that layer.c reads."""
        (cos, sin), slots, tables, lens = self.tensors
        shape, count = (self.num_tokens, 1, self.head_dim), self.num_tokens
        has_rotation_layout = (
            cos.shape == sin.shape == shape and cos.dtype == sin.dtype and cos.stride() == sin.stride()
        )
        has_types = self.dtype in DTYPES and slots.dtype == torch.int64 and tables.dtype == lens.dtype == torch.int32
        is_contiguous = cos.stride(2) == 1 and slots.is_contiguous() and lens.is_contiguous() and tables.stride(-1) == 1
        has_shares_layout = self._shares is None or _supports_shares(self._shares, tables)
        return (
            has_rotation_layout
            and has_types
            and is_contiguous
            and has_shares_layout
            and count > 0
            and len(tables) == len(lens) == count
        )


class CompiledLayer:
    """A layer bound to its KV cache. It holds references to the weights, but only addresses of the cache tensors."""

    def __init__(self, spec: LayerSpec, k_cache: Tensor, v_cache: Tensor) -> None:
        """Raises ValueError for layers that layer.c does not support (`can_compile`)."""
        native = library()
        if native is None or not can_compile(spec, k_cache, v_cache):
            raise ValueError("a layer that is not compiled: see can_compile")
        self._spec = spec
        self._hidden, self._has_next = spec.products[1].outputs, spec.norms[2] is not None
        self._head_dim = k_cache.shape[3]
        self._max_tokens = MAX_ELEMENTS_PER_CALL // max(
            spec.products[0].outputs, spec.products[2].outputs, self._hidden
        )
        self._call = native.kvscope_layer
        self._struct = LayerStruct(
            *(_product(native, weight) for weight in spec.products),
            *(_norm(norm) for norm in (*spec.norms, spec.head_norm)),
            self._hidden,
            spec.products[3].inputs,
            spec.activation,
            spec.dtype == torch.float32,
            spec.sum_dtype == torch.float32,
            _attention(spec, k_cache, v_cache),
        )
        self._address = addressof(self._struct)

    def supports(self, x: Tensor, normed: Tensor | None, step: DecodeStep) -> bool:
        """Whether `__call__` supports these arguments. The number of tokens is limited as in the single C
        operations.
        """
        spec, shape = self._spec, (step.num_tokens, self._hidden)
        is_step = step.dtype == spec.dtype and step.head_dim == self._head_dim and shape[0] <= self._max_tokens
        is_x = x.shape == shape and x.dtype == spec.sum_dtype and x.is_contiguous()
        is_norm = normed is None or (normed.shape == shape and normed.dtype == spec.dtype and normed.is_contiguous())
        return is_step and is_x and is_norm

    def __call__(self, x: Tensor, normed: Tensor | None, step: DecodeStep) -> tuple[Tensor, Tensor | None]:
        """Run the layer and write keys and values to its cache.

        Args:
            x: (T, hidden) of `sum_dtype`, contiguous.
            normed: Attention norm of x if it is computed already, else None.
            step: The batch, which `supports` must accept.

        Returns:
            The layer's result, and the next layer's norm of this result (None if there is no next layer).

        Raises:
            MemoryError: No memory for temporary buffers. Keys and values may have been written.
        """
        out = torch.empty_like(x)
        out_normed = torch.empty(x.shape, dtype=self._spec.dtype) if self._has_next else None
        struct = step.struct
        struct.x, struct.out = x.data_ptr(), out.data_ptr()
        struct.normed = None if normed is None else normed.data_ptr()
        struct.out_normed = None if out_normed is None else out_normed.data_ptr()
        if self._call(self._address, step.address):
            raise MemoryError("no memory for a layer's numbers")
        return out, out_normed


def can_compile(spec: LayerSpec, k_cache: Tensor, v_cache: Tensor) -> bool:
    qkv, o, gate_up, down = spec.products
    head_dim, hidden = k_cache.shape[3], o.outputs
    kv_heads, attended = spec.num_kv_heads, spec.num_heads * head_dim
    do_sizes_match = (
        qkv.outputs == attended + 2 * kv_heads * head_dim and o.inputs == attended and down.outputs == hidden,
        qkv.inputs == gate_up.inputs == hidden and gate_up.outputs == 2 * down.inputs,
        spec.num_heads % kv_heads == 0 and head_dim % 16 == 0,
    )
    are_caches_supported = (
        k_cache.shape == v_cache.shape and k_cache.shape[2] == kv_heads and k_cache.dtype == v_cache.dtype
    )
    are_norms_supported = all(_is_plain(norm.weight, hidden) for norm in spec.norms if norm is not None)
    is_head_norm_supported = spec.head_norm is None or _is_plain(
        spec.head_norm.weight, spec.num_heads + kv_heads, head_dim
    )
    are_sinks_supported = spec.sinks is None or _is_plain(spec.sinks, spec.num_heads)
    is_contiguous = k_cache.stride(3) == v_cache.stride(3) == 1
    return not layer_refusal(spec.dtype, spec.sum_dtype, k_cache.dtype) and all(
        (
            *do_sizes_match,
            are_caches_supported,
            are_norms_supported,
            is_head_norm_supported,
            are_sinks_supported,
            is_contiguous,
        )
    )


def layer_refusal(dtype: torch.dtype, sum_dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """Return why no layer with these dtypes is supported, or "" if one may be (`can_compile`)."""
    return library_refusal() or dtype_refusal(sum_dtype) or cache_refusal(dtype, cache_dtype)


def _supports_shares(shares: Tensor, tables: Tensor) -> bool:
    is_wide = shares.dim() == 2 and len(shares) == len(tables) and shares.shape[1] >= tables.shape[1]
    return is_wide and shares.dtype == torch.float32 and shares.stride(1) == 1


def _is_plain(tensor: Tensor, *shape: int) -> bool:
    return tensor.shape == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()


def _norm(norm: Norm | None) -> NormStruct:
    return NormStruct() if norm is None else NormStruct(norm.weight.data_ptr(), norm.eps)


def _product(native: ctypes.CDLL, weight: Weight) -> ProductStruct:
    return ProductStruct(weight.address, ctypes.cast(getattr(native, weight.function), ctypes.c_void_p).value)


def _attention(spec: LayerSpec, k_cache: Tensor, v_cache: Tensor) -> DecodeStruct:
    head_dim, width = k_cache.shape[3], spec.num_heads * k_cache.shape[3]
    return DecodeStruct(
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        sinks=None if spec.sinks is None else spec.sinks.data_ptr(),
        query_stride_t=width,
        query_stride_h=head_dim,
        **dict(zip(("k_stride_b", "k_stride_s", "k_stride_h"), k_cache.stride()[:3], strict=True)),
        **dict(zip(("v_stride_b", "v_stride_s", "v_stride_h"), v_cache.stride()[:3], strict=True)),
        out_stride_t=width,
        out_stride_h=head_dim,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        block_size=k_cache.shape[1],
        window=spec.sliding_window or 0,
        is_chunked=spec.is_chunked,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        is_f32=spec.dtype == torch.float32,
    )
