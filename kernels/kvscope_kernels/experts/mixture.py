"""The sum of what a token's experts make of it, each by its share: two grouped products and a sum, on the device alone.

A pair is a token and one of its experts. Both products run over tiles of pairs of one expert (`alignment`), so that an
expert's weights are read once for the few rows of a decode; a single token's experts differ, and each is a tile of its
own. The sum over a token's experts goes in their order: the same tokens give the same bits.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvscope_kernels.checks import FLOAT_DTYPES, require
from kvscope_kernels.experts.alignment import ExpertTiles, align_experts
from kvscope_kernels.experts.weights import RELU_SQUARED, ExpertWeights, Gate
from kvscope_kernels.gated_activation import GELU_TANH
from kvscope_kernels.triton_language import cdiv, is_interpreting, jit, jit_varying, next_power_of_2, require_triton, tl

MOST_ROWS: Final = 128
"""Of a tile."""
_AS_IT_IS = -1
_RELU_SQUARED = tl.constexpr(RELU_SQUARED)
_GELU_TANH = tl.constexpr(GELU_TANH)
_GELU_SLOPE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi): tanh(y) is 2 * sigmoid(2 * y) - 1
_GELU_CUBIC = tl.constexpr(0.044715)
_SUM_TILE: Final = 1024


class ProductTiles(NamedTuple):
    """TILE_M pairs by TILE_N outputs, TILE_K inputs at a time."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int


def mix_experts(x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights) -> Tensor:
    """sum over j of shares[t, j] * expert ids[t, j] of x[t], expert e of x being
    down[e] @ gate(up[e] @ x + up_bias[e]) + down_bias[e]; summed in float32.

    x       (tokens, hidden) of the weights' type
    ids     (tokens, top_k) int32 or int64; what is no expert's number adds nothing
    shares  (tokens, top_k), floating

    Returns (tokens, hidden) of the type of x. What is between the products is of that type, too. Raises ValueError.
    Source: Shazeer et al., Outrageously large neural networks, 2017; tiles as of Gale et al., MegaBlocks, 2022.
    """
    check_mixture(x, ids, shares, weights)
    require_triton()
    out = torch.empty_like(x)
    num_tokens, top_k = ids.shape
    if not num_tokens:
        return out
    x, ids, shares = x.contiguous(), ids.contiguous(), shares.contiguous()
    num_experts, hidden, size = weights.down.shape
    tile_m = rows_of_tile(num_tokens, top_k, num_experts, x.element_size())
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
    weight: Tensor,
    bias: Tensor | None,
    outputs: int,
    *,
    gate: Gate | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """(pairs, outputs): of each pair its expert's product with x, of a row a token or a pair."""
    num_pairs, (num_experts, _, inputs) = ids.numel(), weight.shape
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    num_tiles = num_pairs if tiles is None else len(tiles.experts)
    shape = expert_tiles(tile_m, x.element_size(), gate)
    _expert_product_kernel[(cdiv(outputs, shape.tile_n), num_tiles)](
        x,
        weight,
        bias,
        shares,
        out,
        ids if tiles is None else tiles.experts,
        None if tiles is None else tiles.pairs,
        num_pairs,
        num_experts,
        outputs,
        inputs,
        **expert_constants(outputs, inputs, num_pairs // len(x), shape, gate),
        UPCAST_DOT=is_interpreting(),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out


def rows_of_tile(num_tokens: int, top_k: int, num_experts: int, element_bytes: int) -> int:
    """Pairs of a tile: twice as many as fall on an expert, if they fall evenly, so that most experts are one tile and
    read once; 1 of a single token; in float32, multiplied without matrix units, 16."""
    if num_tokens == 1:
        return 1
    if element_bytes == 4:
        return 16
    return min(MOST_ROWS, max(16, next_power_of_2(cdiv(2 * num_tokens * top_k, num_experts))))


def expert_tiles(tile_m: int, element_bytes: int, gate: Gate | None = None) -> ProductTiles:
    """For tiles of up to `tile_m` pairs; of a single token's narrow ones, so that all multiprocessors have some. They
    follow from `tile_m` alone, whose powers of two the warm-up goes through, and all fit 99 KiB of shared memory."""
    is_gated = gate is not None and gate.is_gated
    rows = max(16, tile_m)
    if element_bytes == 4:
        return ProductTiles(rows, 32, 32, 4, 2)
    if rows <= 32:
        return ProductTiles(rows, 32 if tile_m == 1 else 64, 64 if is_gated else 128, 4, 4)
    if rows == 64:
        return ProductTiles(rows, 64, 64, 4, 3)
    return ProductTiles(rows, 64 if is_gated else 128, 64, 8, 3)


def expert_constants(
    outputs: int, inputs: int, pairs_each: int, tiles: ProductTiles, gate: Gate | None
) -> dict[str, object]:
    """The kernel's constants that follow from the shapes; `pairs_each`: pairs that a row of x belongs to."""
    has_limit = gate is not None and gate.limit < float("inf")
    return {
        "PAIRS_EACH": pairs_each,
        "KIND": _AS_IT_IS if gate is None else gate.kind,
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
    bias: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    experts: tl.tensor,
    pairs: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    PAIRS_EACH: tl.constexpr,
    KIND: tl.constexpr,
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
    """One program: TILE_N outputs of a tile's pairs. The weight's rows are those of the matrix units, x's their
    columns. Without `pairs` each tile is a pair."""
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
        column = tl.arange(0, TILE_K)
        num_rows = outputs * (1 + IS_GATED)
        first = expert.to(tl.int64) * num_rows
        weights = weight + (first + n)[:, None] * inputs + column[None, :]
        beside = weights + outputs.to(tl.int64) * inputs
        rows = x + (pair // PAIRS_EACH).to(tl.int64)[:, None] * inputs + column[None, :]
        sums = tl.zeros([TILE_N, TILE_M], tl.float32)
        ups = tl.zeros([TILE_N, TILE_M], tl.float32)
        for start in range(0, inputs, TILE_K):
            inside = (start + column < inputs) | WHOLE_K
            in_weights = in_n[:, None] & inside[None, :]
            numbers = tl.load(rows + start, mask=in_m[:, None] & inside[None, :], other=0.0)
            some = tl.load(weights + start, mask=in_weights, other=0.0)
            if UPCAST_DOT:
                numbers = numbers.to(tl.float32)
                some = some.to(tl.float32)
            sums = tl.dot(some, tl.trans(numbers), sums, input_precision="ieee")
            if IS_GATED:
                other = tl.load(beside + start, mask=in_weights, other=0.0)
                if UPCAST_DOT:
                    other = other.to(tl.float32)
                ups = tl.dot(other, tl.trans(numbers), ups, input_precision="ieee")
        if bias is not None:
            sums += tl.load(bias + first + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
            if IS_GATED:
                ups += tl.load(bias + first + outputs + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        if KIND == _RELU_SQUARED:
            sums = tl.maximum(sums, 0.0)
            sums = sums * sums
        if IS_GATED:
            if LIMIT is not None:
                sums = tl.minimum(sums, LIMIT)
                ups = tl.minimum(tl.maximum(ups, -LIMIT), LIMIT)
            slope = ALPHA * sums
            if KIND == _GELU_TANH:
                slope = _GELU_SLOPE * (sums + _GELU_CUBIC * sums * sums * sums)
            sums = sums / (1.0 + tl.exp(-slope)) * (ups + SHIFT)
        if shares is not None:
            sums *= tl.load(shares + pair, mask=in_m, other=0.0).to(tl.float32)[None, :]
        places = out + pair.to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(places, sums.to(out.dtype.element_ty), mask=in_n[:, None] & in_m[None, :])


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
    """One program: TILE numbers of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(ids + pair)
        is_there = (column < hidden) & (expert >= 0) & (expert < num_experts)
        total += tl.load(parts + pair * hidden + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)


def mix_experts_torch(x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights) -> Tensor:
    """Reference of `mix_experts`: one expert that is asked for after the other. Reads `ids` on the host."""
    check_mixture(x, ids, shares, weights)
    top_k = ids.shape[1]
    flat, wide = ids.reshape(-1), shares.reshape(-1, 1).float()
    parts = torch.zeros(len(flat), x.shape[1], dtype=torch.float32, device=x.device)
    for expert in flat.unique().tolist():
        if not 0 <= expert < len(weights.up):
            continue
        pairs = (flat == expert).nonzero()[:, 0]
        both = linear(x[pairs // top_k], weights.up[expert], _row(weights.up_bias, expert))
        made = linear(weights.gate.of(both), weights.down[expert], _row(weights.down_bias, expert))
        parts[pairs] = made.float() * wide[pairs]
    return parts.view(len(x), top_k, x.shape[1]).sum(1).to(x.dtype)


def check_mixture(x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights) -> None:
    """Raises ValueError for what `mix_experts` does not take."""
    weights.check()
    hidden = weights.down.shape[1]
    if x.dim() != 2 or x.shape[1] != hidden or x.dtype != weights.down.dtype:
        require(False, "x", x, f"(tokens, {hidden}) {weights.down.dtype}")
    if ids.dim() != 2 or len(ids) != len(x) or ids.dtype not in (torch.int32, torch.int64):
        require(False, "ids", ids, f"({len(x)}, top_k) int32 or int64")
    if shares.shape != ids.shape or shares.dtype not in FLOAT_DTYPES:
        require(False, "shares", shares, f"{tuple(ids.shape)}, floating,")


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
