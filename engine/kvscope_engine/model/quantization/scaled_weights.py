"""Dequantizes, on request, weights that a file stores in few bits with separate scales.

Each supported format is recognized by the dtypes and names of its tensors, whatever the configuration calls it:

- FP8: e4m3 or e5m2, with a scale per tensor, row, group of inputs or tile (DeepSeek's `weight_scale_inv`, FBGEMM,
  ModelOpt, compressed-tensors, MXFP8);
- FP4: two e2m1 per byte, the lower one first; MXFP4 (a power of two per 32: https://www.opencompute.org, gpt-oss) and
  NVFP4 (an e4m3 scale per 16, and one number per tensor: ModelOpt, compressed-tensors);
- integers: int8 with a scale per row or group, 4 or 8 bits in words (compressed-tensors' `pack-quantized`);
- bitsandbytes: 4-bit indices into a table of 16 numbers (NF4, FP4), int8 by rows.

A file is unsupported (BadInput) if it has an unknown tensor next to such a weight that could change the weight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from kvscope_engine.model.quantization.packed_words import unpack_words
from kvscope_engine.model.quantization.quantization_recipe import Recipe
from kvscope_engine.model.stored_tensor import ComputedTensor, StoredTensor
from kvscope_kernels.quantized_linear.fp8 import Fp8Weight
from kvscope_kernels.quantized_linear.grouped_weight import CHUNK, GroupedWeight, grouped
from kvscope_telemetry.errors import BadInput

Stored = Mapping[str, StoredTensor]
_FLOAT8: Final = ("F8_E4M3", "F8_E5M2")
_QUANTIZED_DTYPES: Final = (*_FLOAT8, "I8", "U8", "I32")
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_IGNORED_TENSORS: Final = frozenset(
    {
        "activation_scale",
        "input_global_scale",
        "input_scale",
        "input_scale_ub",
        "input_zero_point",
        "k_scale",
        "output_scale",
        "q_scale",
        "v_scale",
        "weight_format",
        "weight_shape",
    }
)
"""Last components of tensor names that are ignored: scales of inputs and outputs, which stay unquantized, and redundant
metadata.
"""
_BITSANDBYTES: Final = ".quant_state.bitsandbytes__"


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    target: str
    """Name of the dequantized weight."""
    parts: frozenset[str]
    """Names of the stored tensors that form the quantized weight."""
    widened: Callable[[torch.dtype], torch.Tensor]
    """Reads the weight and dequantizes it to a dtype."""
    grouped: Callable[[], GroupedWeight | Fp8Weight] | None = None
    """Reads the weight in the format of the kernels; None if the kernels do not support the weight."""
    is_in_order: bool = True
    """Whether the inputs of each group are consecutive."""


def is_scaled(stored: Stored) -> bool:
    return any(tensor.dtype in _FLOAT8 for tensor in stored.values())


def scaled_weights(stored: Stored, recipe: Recipe) -> list[ScaledWeight]:
    """Return all quantized weights of the files. Raises BadInput, naming the tensor, for an unknown format."""
    weights = [weight for name in stored if (weight := _weight(stored, name, recipe)) is not None]
    if not weights:
        raise BadInput(f"it has no layer with quantized weights, although its format is {recipe.method}")
    _check_other_tensors(stored, weights)
    return weights


def plain_tensors(stored: Stored, weights: list[ScaledWeight], dtype: torch.dtype) -> dict[str, Any]:
    """Return the tensors from which a loader of unquantized weights can load the model.

    The tensors that form a quantized weight are replaced by one `ComputedTensor` with the name of the dequantized
    weight. It dequantizes the weight when the loader reads it.
    """
    parts = frozenset[str]().union(*(weight.parts for weight in weights))
    plain: dict[str, Any] = {name: tensor for name, tensor in stored.items() if name not in parts}
    return plain | {weight.target: ComputedTensor(partial(weight.widened, dtype)) for weight in weights}


def _weight(stored: Stored, name: str, recipe: Recipe) -> ScaledWeight | None:
    tensor = stored[name]
    if tensor.dtype not in _QUANTIZED_DTYPES or _is_metadata(name):
        return None
    if name.endswith("_blocks"):
        return _gpt_oss(stored, name)
    if name.endswith(".weight_packed"):
        return _words(stored, name) if tensor.dtype == "I32" else _packed_fp4(stored, name, "global_scale")
    if tensor.dtype in _FLOAT8:
        return _float8(stored, name, recipe)
    if tensor.dtype == "I8":
        return _int8(stored, name)
    if tensor.dtype == "U8" and any(other.startswith(name + _BITSANDBYTES) for other in stored):
        return _bitsandbytes_4bit(stored, name)
    if tensor.dtype == "U8" and f"{name}_scale_2" in stored:
        return _packed_fp4(stored, name, "scale_2")
    return None


def _is_metadata(name: str) -> bool:
    part = name.rpartition(".")[2]
    is_table = part in ("absmax", "nested_absmax", "quant_map", "nested_quant_map", "weight_format")
    return is_table or any(substring in part for substring in ("_scale", "_zero_point", "_shape", "_g_idx"))


def _float8(stored: Stored, name: str, recipe: Recipe) -> ScaledWeight:
    scale = _first(stored, f"{name}_scale_inv", f"{name}_scale")
    tiles = _tiles(stored[name], scale, recipe.tile)

    def widened(dtype: torch.dtype) -> torch.Tensor:
        return _by_expert(_scaled, stored[name].read(), _powers_or_numbers(scale.read()), tiles, dtype)

    def in_fp8() -> Fp8Weight:
        rows, columns = stored[name].shape
        group = -(-min(tiles[1], columns) // CHUNK) * CHUNK
        grid = _powers_or_numbers(scale.read()).reshape(-1, -(-columns // tiles[1]))
        return Fp8Weight(stored[name].read(), grid.repeat_interleave(tiles[0], 0)[:rows].contiguous(), group)

    size = stored[name].shape
    is_supported = stored[name].dtype == "F8_E4M3" and len(size) == 2 and (tiles[1] % CHUNK == 0 or tiles[1] == size[1])
    return ScaledWeight(name, frozenset({name, scale.name}), widened, in_fp8 if is_supported else None)


def _int8(stored: Stored, name: str) -> ScaledWeight:
    _check_matrix(name, stored[name].shape)
    weight, rows = stored[name], stored.get(f"{name.removesuffix('weight')}SCB")
    scale, zero = rows or _first(stored, f"{name}_scale"), stored.get(f"{name}_zero_point")
    tiles = _tiles(weight, scale, None)
    divisor = 1.0 if rows is None else 127.0  # bitsandbytes stores a row's maximum, which is code 127

    def scales_and_offsets() -> tuple[torch.Tensor, torch.Tensor]:
        scales = scale.read().float() / divisor
        return scales, scales * (0.0 if zero is None else zero.read().float())

    def widened(dtype: torch.dtype) -> torch.Tensor:
        scales, low = scales_and_offsets()
        size = torch.Size(weight.shape)
        return (weight.read().float() * _spread(scales, size, tiles) - _spread(low, size, tiles)).to(dtype)

    def in_groups() -> GroupedWeight:
        scales, low = (each.reshape(weight.shape[0], -1) for each in scales_and_offsets())
        codes = weight.read().view(torch.uint8) ^ 0x80  # signed to unsigned: code 0 is -128
        return grouped(codes, scales, -128.0 * scales - low, 8, -(-tiles[1] // CHUNK) * CHUNK)

    is_supported = tiles[0] == 1 and (tiles[1] % CHUNK == 0 or tiles[1] == weight.shape[1])
    parts = {name, scale.name} | ({zero.name} if zero is not None else set())
    return ScaledWeight(name, frozenset(parts), widened, in_groups if is_supported else None)


def _gpt_oss(stored: Stored, name: str) -> ScaledWeight:
    """Return a weight of gpt-oss's experts.

    It is stored as (experts, outputs, blocks, 16) and dequantized to (experts, inputs, outputs).
    """
    scales = _first(stored, f"{name.removesuffix('_blocks')}_scales")

    def widened(dtype: torch.dtype) -> torch.Tensor:
        blocks, exponents = stored[name].read(), scales.read()
        weight = torch.empty(len(blocks), 32 * blocks.shape[2], blocks.shape[1], dtype=dtype)
        for expert, (expert_blocks, power) in enumerate(zip(blocks, exponents, strict=True)):
            numbers = _fp4(expert_blocks) * _powers_of_two(power)[..., None]
            weight[expert] = numbers.flatten(1).T
        return weight

    return ScaledWeight(name.removesuffix("_blocks"), frozenset({name, scales.name}), widened)


def _packed_fp4(stored: Stored, name: str, tensor_scale_name: str) -> ScaledWeight:
    """Return an FP4 weight with a scale per 16 or 32 inputs.

    The scale per tensor is a divisor in compressed-tensors, and a factor in ModelOpt.
    """
    target = name.removesuffix("_packed")
    scale, tensor_scale = _first(stored, f"{target}_scale"), stored.get(f"{target}_{tensor_scale_name}")
    size = *stored[name].shape[:-1], 2 * stored[name].shape[-1]
    tiles = _tiles_of(size, scale, None)

    def widened(dtype: torch.dtype) -> torch.Tensor:
        scales = _powers_or_numbers(scale.read())
        if tensor_scale is not None:
            number = tensor_scale.read().float()
            scales = scales / number if tensor_scale_name == "global_scale" else scales * number
        return _by_expert(
            lambda codes, *scale_args: _scaled(_fp4(codes), *scale_args), stored[name].read(), scales, tiles, dtype
        )

    parts = {name, scale.name} | ({tensor_scale.name} if tensor_scale is not None else set())
    return ScaledWeight(target, frozenset(parts), widened)


def _words(stored: Stored, name: str) -> ScaledWeight:
    """Return a 4- or 8-bit integer weight stored in 32-bit words, with codes relative to the middle of their range.

    Zero points are packed along the outputs.
    """
    target = name.removesuffix("_packed")
    scale, shape = _first(stored, f"{target}_scale"), _first(stored, f"{target}_shape")
    zero, order = stored.get(f"{target}_zero_point"), stored.get(f"{target}_g_idx")
    _check_matrix(name, stored[name].shape)
    outputs, inputs = (int(number) for number in shape.read())
    bits = next((b for b in (4, 8) if stored[name].shape == (outputs, -(-inputs * b // 32))), 0)
    groups = scale.shape[-1] if len(scale.shape) == 2 else 1
    group = -(-inputs // groups) if groups > 1 else -(-inputs // CHUNK) * CHUNK
    if not bits or scale.shape not in ((outputs, groups), (1,)) or (groups > 1 and inputs % groups):
        raise BadInput(
            f"{name} is {list(stored[name].shape)} and its scale {list(scale.shape)}, for {[outputs, inputs]}"
        )

    def codes_and_scales() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes, scales, and the code that stands for zero. Codes and zero points are stored with the
        same offset.
        """
        codes = unpack_words(stored[name].read(), bits)[:, :inputs]
        middle = torch.tensor(float(2 ** (bits - 1)))
        if zero is not None:
            middle = unpack_words(zero.read().T.contiguous(), bits)[:, :outputs].T.float()
        return codes.contiguous(), scale.read().float().expand(outputs, groups), middle.expand(outputs, groups)

    def in_groups() -> GroupedWeight:
        codes, scales, middle = codes_and_scales()
        return grouped(codes, scales.contiguous(), -scales * middle, bits, group)

    def widened(dtype: torch.dtype) -> torch.Tensor:
        codes, scales, middle = codes_and_scales()
        group_index = torch.arange(inputs) // group if order is None else order.read().long()
        return (scales[:, group_index] * (codes - middle[:, group_index])).to(dtype)

    parts = {name, scale.name, shape.name} | {part.name for part in (zero, order) if part is not None}
    read_groups = in_groups if group % CHUNK == 0 else None
    return ScaledWeight(target, frozenset(parts), widened, read_groups, is_in_order=order is None)


def _bitsandbytes_4bit(stored: Stored, name: str) -> ScaledWeight:
    """Return a 4-bit bitsandbytes weight: blocks in row order, the higher 4 bits first. Block maxima may be quantized
    too.
    """
    state_name = next(other for other in stored if other.startswith(name + _BITSANDBYTES))
    state: dict[str, Any] = json.loads(bytes(stored[state_name].read().tolist()))
    parts = frozenset(other for other in stored if other == name or other.startswith(f"{name}."))

    def widened(dtype: torch.dtype) -> torch.Tensor:
        packed, numbers = stored[name].read().flatten(), stored[f"{name}.quant_map"].read().float()
        values = torch.stack((numbers[(packed >> 4).long()], numbers[(packed & 15).long()]), -1).flatten()
        largest = stored[f"{name}.absmax"].read()
        if "nested_blocksize" in state:
            inner = stored[f"{name}.nested_quant_map"].read().float()[largest.long()]
            outer = stored[f"{name}.nested_absmax"].read().float()
            largest = inner * outer.repeat_interleave(int(state["nested_blocksize"]))[: len(inner)]
            largest = largest + float(state["nested_offset"])
        count = math.prod(state["shape"])
        scale = largest.float().repeat_interleave(int(state["blocksize"]))[:count]
        return (values[:count] * scale).view(state["shape"]).to(dtype)

    return ScaledWeight(name, parts, widened)


def _check_matrix(name: str, size: tuple[int, ...]) -> None:
    if len(size) != 2:
        raise BadInput(f"{name} is {list(size)}: whole numbers are read in two dimensions")


def _first(stored: Stored, *names: str) -> StoredTensor:
    tensor = next((stored[name] for name in names if name in stored), None)
    if tensor is None:
        raise BadInput(f"it lacks {names[-1]}")
    return tensor


def _tiles(weight: StoredTensor, scale: StoredTensor, declared: tuple[int, int] | None) -> tuple[int, int]:
    return _tiles_of(weight.shape, scale, declared)


def _tiles_of(size: tuple[int, ...], scale: StoredTensor, declared: tuple[int, int] | None) -> tuple[int, int]:
    """Return the (rows, columns) that share a scale. Raises BadInput if the shapes of weight and scale do not match."""
    rows, columns = size[-2:]
    if math.prod(scale.shape) == 1:
        return rows, columns
    grid = (*scale.shape, 1)[-2:] if len(scale.shape) == 1 else scale.shape[-2:]
    if declared is not None and grid == tuple(-(-n // tile) for n, tile in zip((rows, columns), declared, strict=True)):
        return declared
    leads = tuple(size[:-2]) == tuple(scale.shape[:-2]) or len(scale.shape) == 1
    if not leads or rows % grid[0] or columns % grid[1]:
        raise BadInput(f"{scale.name} is {list(scale.shape)}, which does not fit a weight of {list(size)}")
    return rows // grid[0], columns // grid[1]


def _by_expert(
    widen: Callable[..., torch.Tensor],
    codes: torch.Tensor,
    scales: torch.Tensor,
    tiles: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantize the weights of experts in a loop, so that only one is in float32 at a time."""
    if codes.dim() < 3:
        return widen(codes, scales, tiles, dtype)
    expert_scales = scales if scales.numel() > 1 else scales.expand(len(codes))
    return torch.stack(
        [widen(expert_codes, scale, tiles, dtype) for expert_codes, scale in zip(codes, expert_scales, strict=True)]
    )


def _scaled(codes: torch.Tensor, scales: torch.Tensor, tiles: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return (codes.float() * _spread(scales, codes.shape, tiles)).to(dtype)


def _spread(scales: torch.Tensor, size: torch.Size, tiles: tuple[int, int]) -> torch.Tensor:
    """Return a scale per element of a weight of `size`, or a scalar if all elements share one."""
    if scales.numel() == 1:
        return scales.reshape(())
    grid = scales[:, None] if scales.dim() == 1 else scales
    rows = grid.repeat_interleave(tiles[0], 0)[: size[0]]
    return rows.repeat_interleave(tiles[1], 1)[:, : size[1]]


def _fp4(packed: torch.Tensor) -> torch.Tensor:
    """Unpack (..., n) bytes to (..., 2 n) float32."""
    table, byte_values = torch.tensor(_FP4), packed.view(torch.uint8)
    return torch.stack((table[(byte_values & 15).long()], table[(byte_values >> 4).long()]), -1).flatten(-2)


def _powers_or_numbers(scales: torch.Tensor) -> torch.Tensor:
    return _powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()


def _powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return the values of e8m0 bytes, whose exponents are biased by 127."""
    return torch.exp2(exponents.float() - 127.0)


def _check_other_tensors(stored: Stored, weights: list[ScaledWeight]) -> None:
    """Raise BadInput for tensors of unknown format, and for those that may change a quantized weight."""
    parts = frozenset[str]().union(*(weight.parts for weight in weights))
    modules = {weight.target.rpartition(".")[0] for weight in weights if weight.target.endswith(".weight")}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if name in parts or part in _IGNORED_TENSORS:
            continue
        is_unknown_metadata = (
            module in modules
            and part != "weight"
            and any(substring in part for substring in ("weight", "scale", "zero"))
        )
        if is_unknown_metadata or tensor.dtype in _QUANTIZED_DTYPES:
            raise BadInput(f"{name} ({tensor.dtype}) is of a form that is not read")
