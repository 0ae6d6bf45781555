"""Weighted sum of each token's experts: two grouped matmuls and a sum, without synchronization with the host.

A pair is a token and one of its experts. Both matmuls run over tiles of pairs of one expert (`alignment`), so that an
expert's weights are read once for the few rows of a decode. With a single token, each pair is a separate tile, because
its experts differ. The results of a token's experts are added in a fixed order, so that the sum is deterministic.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvscope_kernels.checks import FLOAT_DTYPES, require
from kvscope_kernels.fused_moe.alignment import ExpertTiles, align_experts
from kvscope_kernels.fused_moe.expert_weights import GROUP, RELU_SQUARED, ExpertWeights, Gate, Mxfp4Weight
from kvscope_kernels.gated_activation import GELU_TANH
from kvscope_kernels.triton_language import (
    add_product,
    cdiv,
    is_interpreting,
    jit,
    jit_varying,
    next_power_of_2,
    require_triton,
    tl,
)

MAX_ROWS_PER_TILE: Final = 128
"""Maximum rows of a tile. The limit is half as large for 4-bit weights, which are dequantized in registers."""
_NO_ACTIVATION = -1
_RELU_SQUARED = tl.constexpr(RELU_SQUARED)
_GELU_TANH = tl.constexpr(GELU_TANH)
_GELU_SLOPE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi): tanh(y) is 2 * sigmoid(2 * y) - 1
_GELU_CUBIC = tl.constexpr(0.044715)
_GROUP = tl.constexpr(GROUP)
_BYTES = tl.constexpr(GROUP // 2)
_SUM_TILE: Final = 1024


class MoeProductTiles(NamedTuple):
    """Tile of one program: TILE_M pairs by TILE_N outputs, summed over TILE_K inputs at a time."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int


def mix_experts(x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights) -> Tensor:
    """Return the sum over j of shares[t, j] * expert ids[t, j] of x[t], accumulated in float32.

    Expert e of x is down[e] @ gate(up[e] @ x + up_bias[e]) + down_bias[e]. The intermediate result between the two
    matmuls has the dtype of x.

    Args:
        x: (tokens, hidden) with the weights' dtype.
        ids: (tokens, top_k) int32 or int64; ids outside [0, experts) add nothing.
        shares: (tokens, top_k), floating-point.
        weights: Weights of all experts.

    Returns:
        (tokens, hidden) with the dtype of x.

    Raises:
        ValueError: Unsupported arguments.

    Source: Shazeer et al., Outrageously large neural networks, 2017; tiles as in Gale et al., MegaBlocks, 2022.
    """
    check_mixture(x, ids, shares, weights)
    require_triton()
    out = torch.empty_like(x)
    num_tokens, top_k = ids.shape
    if not num_tokens:
        return out
    x, ids, shares = x.contiguous(), ids.contiguous(), shares.contiguous()
    num_experts, hidden, size = weights.shape
    is_packed = isinstance(weights.down, Mxfp4Weight)
    tile_m = rows_of_tile(num_tokens, top_k, num_experts, x.element_size(), is_packed=is_packed)
    tiles = None if tile_m == 1 else align_experts(ids.view(-1), num_experts, tile_m)
    inner = _product(x, ids, tiles, tile_m, weights.up, weights.up_bias, size, gate=weights.gate)
    parts = _product(inner, ids, tiles, tile_m, weights.down, weights.down_bias, hidden, shares=shares)
    sizes = num_experts, hidden
    _sum_experts_kernel[(num_tokens, cdiv(hidden, _SUM_TILE))](
        parts, ids, out, *sizes, TOP_K=top_k, TILE=_SUM_TILE, num_warps=4
    )
    return out


def _product(
    x: Tensor,
    ids: Tensor,
    tiles: ExpertTiles | None,
    tile_m: int,
    weight: Tensor | Mxfp4Weight,
    bias: Tensor | None,
    outputs: int,
    *,
    gate: Gate | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """Multiply the row of x of each pair by the weight of the pair's expert: (pairs, outputs). x has one row
    per token or per pair.
    """
    num_pairs, inputs = ids.numel(), x.shape[1]
    codes, powers = weight if isinstance(weight, Mxfp4Weight) else (weight, None)
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    num_tiles = num_pairs if tiles is None else len(tiles.experts)
    shape = expert_tiles(tile_m, x.element_size(), gate, is_packed=powers is not None)
    _expert_product_kernel[(cdiv(outputs, shape.tile_n), num_tiles)](
        x,
        codes,
        powers,
        bias,
        shares,
        out,
        ids if tiles is None else tiles.experts,
        None if tiles is None else tiles.pairs,
        num_pairs,
        len(codes),
        outputs,
        inputs,
        **expert_constants(outputs, inputs, num_pairs // len(x), shape, gate),
        UPCAST_DOT=is_interpreting(),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out


def rows_of_tile(num_tokens: int, top_k: int, num_experts: int, element_bytes: int, *, is_packed: bool = False) -> int:
    """Return the number of pairs per tile: twice the average number of pairs per expert.

    Then most experts have one tile, and their weights are read once. The number is 1 for a single token, and 16 in
    float32, which does not use matrix units.
    """
    if num_tokens == 1:
        return 1
    if element_bytes == 4:
        return 16
    max_rows = MAX_ROWS_PER_TILE // 2 if is_packed else MAX_ROWS_PER_TILE
    return min(max_rows, max(16, next_power_of_2(cdiv(2 * num_tokens * top_k, num_experts))))


def expert_tiles(
    tile_m: int, element_bytes: int, gate: Gate | None = None, *, is_packed: bool = False
) -> MoeProductTiles:
    """Return the shape of tiles of up to `tile_m` pairs. All shapes fit 99 KiB of shared memory.

    For a single token, tiles are narrow, to occupy all multiprocessors. Within one model, the shape depends only on
    `tile_m`, a power of two. The warm-up runs all its values, so that no kernel is compiled while serving.
    """
    is_gated = gate is not None and gate.is_gated
    rows = max(16, tile_m)
    if element_bytes == 4:
        return MoeProductTiles(rows, 32, 32, 4, 2)
    if is_packed:  # no two warps dequantize the same weights
        return MoeProductTiles(rows, 64, 128, 4, 4) if rows <= 32 else MoeProductTiles(rows, 128, 64, 8, 3)
    if rows <= 32:
        return MoeProductTiles(rows, 32 if tile_m == 1 else 64, 64 if is_gated else 128, 4, 4)
    if rows == 64:
        return MoeProductTiles(rows, 64, 64, 4, 3)
    return MoeProductTiles(rows, 64 if is_gated else 128, 64, 8, 3)


def expert_constants(
    outputs: int, inputs: int, pairs_per_row: int, tiles: MoeProductTiles, gate: Gate | None
) -> dict[str, object]:
    """Return the kernel's constants that depend on shapes. `pairs_per_row` is the number of pairs per row of x."""
    has_limit = gate is not None and gate.limit < float("inf")
    return {
        "PAIRS_PER_ROW": pairs_per_row,
        "ACTIVATION": _NO_ACTIVATION if gate is None else gate.kind,
        "IS_GATED": gate is not None and gate.is_gated,
        "ALPHA": 1.0 if gate is None else gate.alpha,
        "LIMIT": gate.limit if gate is not None and has_limit else None,
        "SHIFT": 0.0 if gate is None else gate.shift,
        "TILE_M": tiles.tile_m,
        "TILE_N": tiles.tile_n,
        "TILE_K": tiles.tile_k,
        "WHOLE_N": outputs % tiles.tile_n == 0,
        "WHOLE_K": inputs % tiles.tile_k == 0,
    }


@jit_varying(numbers=("num_pairs",))
def _expert_product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    powers: tl.tensor,
    bias: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    experts: tl.tensor,
    pairs: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    PAIRS_PER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """Each program computes TILE_N outputs of the pairs in a tile. Without `pairs`, each tile is one pair.

    The matrix multiplication is weight times transposed x, so that rows of the weight are its rows, and rows of x its
    columns. `Mxfp4Weight` describes the layout of packed weights (`weight` has the codes, and `powers` is not None).
    """
    tile = tl.program_id(1)
    expert = tl.load(experts + tile)
    if (expert >= 0) & (expert < num_experts):
        m = tl.arange(0, TILE_M)
        if pairs is None:
            pair = tile + m * 0
            in_m = m == 0
        else:
            pair = tl.load(pairs + tile * TILE_M + m)
            in_m = pair < num_pairs
        n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
        in_n = (n < outputs) | WHOLE_N
        weight_rows = outputs * (1 + IS_GATED)  # of an expert: those of the gate, then those of up
        first = expert.to(tl.int64) * weight_rows
        x_rows = x + (pair // PAIRS_PER_ROW).to(tl.int64)[:, None] * inputs
        sums = tl.zeros([TILE_N, TILE_M], tl.float32)
        ups = tl.zeros([TILE_N, TILE_M], tl.float32)
        if powers is None:
            column = tl.arange(0, TILE_K)
            weights = weight + (first + n)[:, None] * inputs + column[None, :]
            up_weights = weights + outputs.to(tl.int64) * inputs
            for start in range(0, inputs, TILE_K):
                inside = (start + column < inputs) | WHOLE_K
                in_weights = in_n[:, None] & inside[None, :]
                numbers = tl.load(x_rows + (start + column)[None, :], mask=in_m[:, None] & inside[None, :], other=0.0)
                tile_weights = tl.load(weights + start, mask=in_weights, other=0.0)
                sums = add_product(tile_weights, numbers, sums, UPCAST_DOT)
                if IS_GATED:
                    ups = add_product(tl.load(up_weights + start, mask=in_weights, other=0.0), numbers, ups, UPCAST_DOT)
        else:
            byte_index = tl.arange(0, TILE_K // 2)
            group = tl.arange(0, TILE_K // _GROUP) * _BYTES
            codes = weight + (first + n)[:, None] * (inputs // 2)
            groups = powers + (first + n)[:, None] * (inputs // _GROUP)
            up_offset = outputs.to(tl.int64) * inputs  # in weights, from a gate weight to its up weight
            for start in range(0, inputs // 2, TILE_K // 2):
                byte = start + byte_index
                inside = (byte < inputs // 2) | WHOLE_K
                in_codes, in_rows = in_n[:, None] & inside[None, :], in_m[:, None] & inside[None, :]
                low = x_rows + (byte // _BYTES * _GROUP + byte % _BYTES)[None, :]  # inputs in the low halves of bytes
                numbers = tl.load(low, mask=in_rows, other=0.0)
                high_numbers = tl.load(low + _BYTES, mask=in_rows, other=0.0)
                tile_weights = tl.load(codes + byte[None, :], mask=in_codes, other=0)
                # Any valid power will do where the mask is False, because the masked codes are 0.
                in_groups = in_n[:, None] & ((start + group < inputs // 2) | WHOLE_K)[None, :]
                of_groups = groups + ((start + group) // _BYTES)[None, :]
                power = _powers(tl.load(of_groups, mask=in_groups, other=1), TILE_N, TILE_K // _GROUP)
                sums = add_product(_widened(tile_weights & 15, power, numbers), numbers, sums, UPCAST_DOT)
                sums = add_product(_widened(tile_weights >> 4, power, numbers), high_numbers, sums, UPCAST_DOT)
                if IS_GATED:
                    tile_weights = tl.load(codes + up_offset // 2 + byte[None, :], mask=in_codes, other=0)
                    power = _powers(
                        tl.load(of_groups + up_offset // _GROUP, mask=in_groups, other=1), TILE_N, TILE_K // _GROUP
                    )
                    ups = add_product(_widened(tile_weights & 15, power, numbers), numbers, ups, UPCAST_DOT)
                    ups = add_product(_widened(tile_weights >> 4, power, numbers), high_numbers, ups, UPCAST_DOT)
        if bias is not None:
            sums += tl.load(bias + first + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
            if IS_GATED:
                ups += tl.load(bias + first + outputs + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION == _RELU_SQUARED:
            sums = tl.maximum(sums, 0.0, propagate_nan=tl.PropagateNan.ALL)
            sums = sums * sums
        if IS_GATED:
            if LIMIT is not None:
                sums = tl.minimum(sums, LIMIT, propagate_nan=tl.PropagateNan.ALL)
                ups = tl.clamp(ups, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            slope = ALPHA * sums
            if ACTIVATION == _GELU_TANH:
                slope = _GELU_SLOPE * (sums + _GELU_CUBIC * sums * sums * sums)
            sums = sums / (1.0 + tl.exp(-slope)) * (ups + SHIFT)
        if shares is not None:
            sums *= tl.load(shares + pair, mask=in_m, other=0.0).to(tl.float32)[None, :]
        out_pointers = out + pair.to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(out_pointers, sums.to(out.dtype.element_ty), mask=in_n[:, None] & in_m[None, :])


@jit
def _powers(power: tl.tensor, TILE_N: tl.constexpr, GROUPS: tl.constexpr) -> tl.tensor:
    """Return 2^(power - 1), (TILE_N, GROUPS) in float32, repeated for each byte of a group: (TILE_N, GROUPS * 16).

    A weight is its code's number times 2^(power - 127). This factor is larger by 2^126, because `_widened` multiplies
    it by numbers that are smaller by 2^126.
    """
    # The exponent field of a float32, from bit 23 on, has a bias of 127.
    number = ((power.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)
    each = number[:, :, None] * tl.full([TILE_N, GROUPS, _BYTES], 1.0, tl.float32)
    return tl.reshape(each, [TILE_N, GROUPS * _BYTES])


@jit
def _widened(code: tl.tensor, power: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Convert 4-bit codes to numbers, multiply them by `power` (`_powers`), and convert the products to the dtype of
    `like`.

    Exponent and mantissa bits are moved to their positions in a float32. This is also correct for the format's
    subnormal number, which becomes a subnormal float32. The exponent's bias is 1 in a code and 127 in a float32, so
    that all numbers are too small by 2^126, for which `power` compensates.
    """
    bits = code.to(tl.int32)
    number = (((bits & 7) << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True)
    return (number * power).to(like.dtype)


@jit
def _sum_experts_kernel(
    parts: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    num_experts: tl.tensor,
    hidden: tl.tensor,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Each program adds TILE columns of one token's experts."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(ids + pair)
        is_valid = (column < hidden) & (expert >= 0) & (expert < num_experts)
        total += tl.load(parts + pair * hidden + column, mask=is_valid, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)


def mix_experts_torch(x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights) -> Tensor:
    """Reference of `mix_experts`. Loops over the experts in `ids`, which it reads on the host."""
    check_mixture(x, ids, shares, weights)
    top_k = ids.shape[1]
    flat, flat_shares = ids.reshape(-1), shares.reshape(-1, 1).float()
    parts = torch.zeros(len(flat), x.shape[1], dtype=torch.float32, device=x.device)
    for expert in sorted(set(flat.tolist())):
        if not 0 <= expert < weights.shape[0]:
            continue
        pairs = (flat == expert).nonzero()[:, 0]
        both = linear(x[pairs // top_k], _dense_weight(weights.up, expert, x.dtype), _bias_row(weights.up_bias, expert))
        expert_out = linear(
            weights.gate.apply(both), _dense_weight(weights.down, expert, x.dtype), _bias_row(weights.down_bias, expert)
        )
        parts[pairs] = expert_out.float() * flat_shares[pairs]
    return parts.view(len(x), top_k, x.shape[1]).sum(1).to(x.dtype)


def check_mixture(x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights) -> None:
    weights.check()
    hidden, dtype = weights.shape[1], weights.dtype or x.dtype
    if x.dim() != 2 or x.shape[1] != hidden or x.dtype != dtype or dtype not in FLOAT_DTYPES:
        require(False, "x", x, f"(tokens, {hidden}) {dtype}, floating,")
    if ids.dim() != 2 or len(ids) != len(x) or ids.dtype not in (torch.int32, torch.int64):
        require(False, "ids", ids, f"({len(x)}, top_k) int32 or int64")
    if shares.shape != ids.shape or shares.dtype not in FLOAT_DTYPES:
        require(False, "shares", shares, f"{tuple(ids.shape)}, floating,")


def _dense_weight(weight: Tensor | Mxfp4Weight, expert: int, dtype: torch.dtype) -> Tensor:
    return weight.widened(expert, dtype) if isinstance(weight, Mxfp4Weight) else weight[expert]


def _bias_row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
