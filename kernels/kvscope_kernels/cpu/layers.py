"""Small operations of a layer on a CPU, from layers.c, each in one pass over its operands.

For unsupported operands (float16, 8-bit caches), they run the torch reference.
"""

import ctypes

import torch
from torch import Tensor

from kvscope_kernels.cpu.library import RotationStruct, library
from kvscope_kernels.cpu.operand_types import cache_refusal, dtype_refusal
from kvscope_kernels.gated_activation import ACTIVATIONS, gated_activation_torch
from kvscope_kernels.kv_formats import Cache
from kvscope_kernels.rms_norm import rms_norm_torch
from kvscope_kernels.rotate_write import Rotation, check_rotation, rotate_write_torch

MAX_ELEMENTS_PER_CALL = 1 << 18
"""Maximum number of elements for which the C operations are used. They run on one thread, while torch divides
larger operands among threads.
"""


def rms_norm_native(x: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype) -> Tensor:
    """Run `rms_norm`, reading each row twice and writing it once."""
    native = library()
    is_weight = weight.dtype == torch.float32 and weight.shape == x.shape[-1:] and weight.is_contiguous()
    is_supported = is_weight and not dtype_refusal(x.dtype, dtype) and x.is_contiguous()
    if native is None or not is_supported or not 0 < x.numel() <= MAX_ELEMENTS_PER_CALL:
        return rms_norm_torch(x, weight, eps, dtype)
    out = torch.empty(x.shape, dtype=dtype)
    size = x.shape[-1]
    types = x.dtype == torch.float32, dtype == torch.float32
    rows = x.numel() // size
    native.kvscope_rms_norm(x.data_ptr(), weight.data_ptr(), float(eps), out.data_ptr(), rows, size, *types)
    return out


def add_rms_norm_native(
    x: Tensor, delta: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    total = (x + delta).to(x.dtype)
    return total, rms_norm_native(total, weight, eps, dtype)


def gated_activation_native(both: Tensor, kind: int) -> Tensor:
    native = library()
    is_supported = (
        not dtype_refusal(both.dtype) and both.is_contiguous() and kind in ACTIVATIONS and both.shape[-1] % 2 == 0
    )
    if native is None or not is_supported or not 0 < both.numel() <= MAX_ELEMENTS_PER_CALL:
        return gated_activation_torch(both, kind)
    size = both.shape[-1] // 2
    out = torch.empty((*both.shape[:-1], size), dtype=both.dtype)
    is_f32 = both.dtype == torch.float32
    native.kvscope_gate(both.data_ptr(), out.data_ptr(), out.numel() // size, size, kind, is_f32)
    return out


def rotate_write_native(
    heads: Tensor,
    rotation: Rotation,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Run `rotate_write`. Heads without rotation use the torch reference."""
    native, cos_sin = library(), rotation.cos_sin
    is_supported = cos_sin is not None and not cache_refusal(heads.dtype, k_cache.dtype)
    if (
        native is None
        or cos_sin is None
        or not is_supported
        or heads.numel() > MAX_ELEMENTS_PER_CALL
        or not heads.is_contiguous()
    ):
        return rotate_write_torch(heads, rotation, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    check_rotation(heads, rotation, Cache(k_cache, v_cache, k_scale, v_scale), slot_mapping)
    if cos_sin.cos.dtype != heads.dtype or cos_sin.cos.stride(0) != cos_sin.signed_sin.stride(0):
        return rotate_write_torch(heads, rotation, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    tokens, _, dim = heads.shape
    query = torch.empty((tokens, rotation.num_heads, dim), dtype=heads.dtype)
    norm = rotation.norm
    arguments = RotationStruct(
        heads.data_ptr(),
        None if norm is None else norm.weight.data_ptr(),
        cos_sin.cos.data_ptr(),
        cos_sin.signed_sin.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        query.data_ptr(),
        tokens,
        rotation.num_heads,
        k_cache.shape[2],
        dim,
        cos_sin.cos.stride(0),
        k_cache.shape[1],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        0.0 if norm is None else float(norm.eps),
        heads.dtype == torch.float32,
    )
    native.kvscope_rotate_write(ctypes.addressof(arguments))
    return query
