"""Formats of keys and values in the cache: unchanged, or 8-bit with one scale per token and KV head.

Defines the two 8-bit formats and their arithmetic, in torch and for the kernels. With x one head's vector of a token:

    scale = max|x| / LARGEST[dtype],  data = round(x / scale),  and x is read back as data * scale

int8 rounds to the nearest of -127..127, float8_e4m3fn (OCP 8-bit floating point, 2023) to the nearest e4m3 number of at
most 448; a zero vector has scale 0. Both formats are exact in bfloat16 and float16, so dot products with data are
exact, and a scale multiplies their sum. Independent of blocks.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvscope_kernels.launch import compute_capability
from kvscope_kernels.triton_language import is_interpreting, jit, tl

LARGEST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest number of each 8-bit format."""

UNQUANTIZED: Final = 0
INT8: Final = 1
E4M3: Final = 2
"""Cache format: e4m3 converted by GPU instructions, on compute capability 8.9 and up."""
E4M3_BITS: Final = 3
"""Cache format: e4m3 viewed as uint8 and converted by shifts, for devices without that type."""

E4M3_HALF: Final = 256.0
"""Factor 2^8 that corrects e4m3 numbers converted to float16 by shifting their exponent and mantissa bits.
Without it, they are too small, because the exponent biases are 7 and 15.
"""

_INT8 = tl.constexpr(INT8)
_E4M3 = tl.constexpr(E4M3)
_E4M3_BITS = tl.constexpr(E4M3_BITS)
_E4M3_HALF = tl.constexpr(E4M3_HALF)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
_SUBNORMAL = tl.constexpr(16384.0)  # its lowest mantissa bit is 2^-9, the step of e4m3 below 2^-6
_SUBNORMAL_BITS = tl.constexpr(141 << 23)  # bits of `_SUBNORMAL`


class Cache(NamedTuple):
    """One layer's keys and values (num_blocks, block_size, num_kv_heads, dim), and their scales if they are 8-bit."""

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None = None
    """(num_blocks, block_size, num_kv_heads) float32"""
    v_scale: Tensor | None = None


def kv_format(cache: Tensor) -> int:
    """Return the format of a cache for kernels: `UNQUANTIZED`, `INT8`, `E4M3` or `E4M3_BITS`."""
    if cache.dtype == torch.float8_e4m3fn:
        return fp8_format(compute_capability(cache.device))
    return INT8 if cache.dtype == torch.int8 else UNQUANTIZED


def fp8_format(capability: int) -> int:
    """Return the format constant for e4m3 on a GPU of this compute capability. Triton lacks the type below 8.9."""
    return E4M3_BITS if capability < 89 or is_interpreting() else E4M3


def scale_strides(k_scale: Tensor | None) -> tuple[int | None, ...]:
    """Return the strides of the scales, which are equal for keys and values; (None, None, None) without scales."""
    return k_scale.stride() if k_scale is not None else (None, None, None)


def as_kernel_input(cache: Tensor, cache_format: int) -> Tensor:
    """Return the cache viewed as uint8 if the kernel converts its bits, otherwise the cache."""
    return cache.view(torch.uint8) if cache_format == E4M3_BITS else cache


def as_bytes(tensor: Tensor) -> Tensor:
    """View float8 as uint8, because torch cannot index float8 on a CPU. Other dtypes are unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def quantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize (..., dim) floating-point -> data (..., dim) of `dtype`, scale (...) float32."""
    largest = LARGEST[dtype]
    exact = rows.float()
    scale = exact.abs().amax(-1).div_(largest)
    data = exact.div(scale.where(scale > 0, 1.0)[..., None])
    if dtype == torch.int8:
        data = data.round_()
    return data.clamp_(-largest, largest).to(dtype), scale


def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize (..., dim) 8-bit and (...) float32 -> (..., dim) of `dtype`: multiplied in float32, rounded once.

    e4m3 is converted by its bits, 7 times as fast on a CPU as torch's conversion. The cache never contains NaN.
    """
    if data.dtype == torch.float8_e4m3fn:
        bits = data.view(torch.uint8).to(torch.int16)
        data = bits.bitwise_and(0x80).bitwise_left_shift_(8).bitwise_or_(bits.bitwise_and_(0x7F).bitwise_left_shift_(7))
        data, scale = data.view(torch.float16), scale * E4M3_HALF
    return data.to(torch.float32).mul_(scale[..., None]).to(dtype)


@jit
def quantize_rows(rows: tl.tensor, KV_FORMAT: tl.constexpr) -> tl.tensor:
    """Quantize (n, dim), zero where masked, in a kernel -> data in the cache's format, scale (n,) float32.
    Bit-identical to `quantize`.
    """
    largest: tl.constexpr = 127.0 if KV_FORMAT == _INT8 else 448.0
    exact = rows.to(tl.float32)
    top = tl.max(tl.abs(exact), 1)
    scale = tl.div_rn(top, tl.full(top.shape, largest, tl.float32))
    divisor = tl.where(scale > 0.0, scale, 1.0)
    data = tl.div_rn(exact, tl.broadcast_to(divisor[:, None], exact.shape))
    data = tl.minimum(tl.maximum(data, -largest), largest)
    if KV_FORMAT == _INT8:
        quantized = ((data + _ROUND) - _ROUND).to(tl.int8)
    elif KV_FORMAT == _E4M3:
        quantized = data.to(tl.float8e4nv)
    else:
        quantized = _e4m3_bits(data)
    return quantized, scale


@jit
def _e4m3_bits(data: tl.tensor) -> tl.tensor:
    """Convert float32 of at most 448 to the bits of the nearest e4m3 number, ties to even, as uint8."""
    bits = data.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    tie = (magnitude >> 20) & 1
    normal = ((magnitude + 0x7FFFF + tie) >> 20) - (120 << 3)
    small = (tl.abs(data) + _SUBNORMAL).to(tl.uint32, bitcast=True) - _SUBNORMAL_BITS
    number = tl.where(magnitude < (121 << 23), small, normal)
    return (number | (bits >> 31 << 7)).to(tl.uint8)


@jit
def widen(data: tl.tensor, dtype: tl.constexpr, KV_FORMAT: tl.constexpr) -> tl.tensor:
    """Convert loaded data to `dtype`, exactly, for use in a dot product."""
    if KV_FORMAT == _E4M3_BITS:
        bits = data.to(tl.int16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        wide = (half * _E4M3_HALF).to(dtype)
    else:
        wide = data.to(dtype)
    return wide
