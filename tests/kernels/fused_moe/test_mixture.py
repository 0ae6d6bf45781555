"""Mixtures of experts: every implementation equals float64."""

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu

from benchmarks.compile_report.offline_compile import MAX_SHARED_BYTES
from kvscope_kernels.fused_moe.expert_weights import FP4, RELU_SQUARED, ExpertWeights, Gate, Mxfp4Weight, to_mxfp4
from kvscope_kernels.fused_moe.mixture import MAX_ROWS_PER_TILE, expert_tiles, rows_of_tile
from kvscope_kernels.gated_activation import GELU_TANH, SILU

GPT_OSS = Gate(SILU, 1.702, 7.0, 1.0)
DEEPSEEK_V4 = Gate(SILU, limit=0.5)
GATES = {"silu": Gate(), "gelu": Gate(GELU_TANH), "gpt-oss": GPT_OSS, "cut": DEEPSEEK_V4, "relu": Gate(RELU_SQUARED)}


def random_mixture(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    size: int,
    gate: Gate,
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=draw).to(dtype)
    scores = torch.randn(num_tokens, num_experts, generator=draw)
    shares, ids = scores.softmax(-1).topk(top_k)
    rows = size * (1 + gate.is_gated)
    up = (torch.randn(num_experts, rows, hidden, generator=draw) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, size, generator=draw) / size**0.5).to(dtype)
    biases = [torch.randn(num_experts, n, generator=draw).to(dtype) if has_bias else None for n in (rows, hidden)]
    return x, ids, shares.to(dtype), ExpertWeights(up, down, biases[0], biases[1], gate)


def expected_mixture(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """Return the formula in float64, token by token."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (row, own, parts) in enumerate(zip(x.double(), ids.tolist(), shares.double(), strict=True)):
        for expert, share in zip(own, parts, strict=True):
            if not 0 <= expert < len(weights.up):
                continue
            both = weights.up[expert].double() @ row
            if weights.up_bias is not None:
                both += weights.up_bias[expert].double()
            made = weights.down[expert].double() @ gated(both, weights.gate)
            if weights.down_bias is not None:
                made += weights.down_bias[expert].double()
            out[token] += share * made
    return out


def gated(both: torch.Tensor, gate: Gate) -> torch.Tensor:
    if gate.kind == RELU_SQUARED:
        return torch.relu(both) ** 2
    first, second = both.chunk(2)
    first, second = first.clamp(max=gate.limit), second.clamp(-gate.limit, gate.limit) + gate.shift
    act = gelu(first, approximate="tanh") if gate.kind == GELU_TANH else first * torch.sigmoid(gate.alpha * first)
    return act * second


def on(device: str, weights: ExpertWeights) -> ExpertWeights:
    moved = [None if each is None else each.to(device) for each in weights[:4]]
    return ExpertWeights(*moved, weights.gate)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden", "size"),
    [(1, 3, 5, 48, 40), (1, 1, 1, 16, 16), (2, 2, 4, 24, 200), (9, 4, 6, 130, 34), (70, 2, 3, 64, 72)],
)
def test_expert_mixture_equals_the_float64_reference(
    runner: Any, num_tokens: int, top_k: int, num_experts: int, hidden: int, size: int, dtype: torch.dtype
) -> None:
    given = random_mixture(num_tokens, top_k, num_experts, hidden, size, Gate(), dtype)
    x, ids, shares, weights = given
    found = runner.ops.mix_experts(*(each.to(runner.device) for each in (x, ids, shares)), on(runner.device, weights))
    assert found.dtype == dtype
    assert found.shape == x.shape
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    wide = expected_mixture(*given)
    torch.testing.assert_close(found.cpu().double(), wide, rtol=tolerance, atol=tolerance)
    error = (found.cpu().double() - wide).square().mean().sqrt() / wide.square().mean().sqrt()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[dtype]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_expert_mixture_with_gates_and_biases_equals_the_reference(
    runner: Any, gate: Gate, has_bias: bool, num_tokens: int
) -> None:
    given = random_mixture(num_tokens, 2, 4, 32, 48, gate, torch.float32, has_bias=has_bias, seed=2)
    x, ids, shares, weights = given
    x *= 3  # makes the limits of gates take effect
    found = runner.ops.mix_experts(*(each.to(runner.device) for each in (x, ids, shares)), on(runner.device, weights))
    torch.testing.assert_close(found.cpu().double(), expected_mixture(*given), rtol=1e-4, atol=1e-4)


def four_bit_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return (..., inputs) random numbers of the format, with a power of two for each 32 inputs."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.tensor(FP4)[torch.randint(0, 8, shape, generator=draw)]
    signs = torch.randint(0, 2, shape, generator=draw) * 2 - 1
    powers = torch.randint(-9, -3, (*shape[:-1], shape[-1] // 32), generator=draw)
    return torch.ldexp(numbers * signs, powers.repeat_interleave(32, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden", "size"), [(1, 64, 32), (3, 32, 160), (40, 96, 64)])
def test_mixture_of_four_bit_weights_is_close_to_the_reference(
    runner: Any, num_tokens: int, hidden: int, size: int, dtype: torch.dtype
) -> None:
    x, ids, shares, weights = random_mixture(num_tokens, 2, 5, hidden, size, GPT_OSS, dtype, has_bias=True, seed=4)
    up, down = four_bit_numbers(5, 2 * size, hidden).to(dtype), four_bit_numbers(5, hidden, size, seed=1).to(dtype)
    packed = to_mxfp4(up), to_mxfp4(down)
    assert packed[0] is not None
    assert packed[1] is not None
    wide = expected_mixture(x, ids, shares, weights._replace(up=up, down=down))
    moved = [Mxfp4Weight(*(part.to(runner.device) for part in each)) for each in packed if each is not None]
    held = weights._replace(up=moved[0], down=moved[1])
    biases = [None if each is None else each.to(runner.device) for each in (held.up_bias, held.down_bias)]
    held = held._replace(up_bias=biases[0], down_bias=biases[1])
    found = runner.ops.mix_experts(*(each.to(runner.device) for each in (x, ids, shares)), held)
    error = (found.cpu().double() - wide).square().mean().sqrt() / wide.square().mean().sqrt()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[dtype]


def test_four_bit_packing_of_expert_weights_is_exact_or_refused() -> None:
    weight = four_bit_numbers(2, 6, 96)
    weight[0, 0] = 0.0
    weight[1, 2, :32] = 0.5  # a group without the largest number
    packed = to_mxfp4(weight.bfloat16())
    assert packed is not None
    assert (packed.codes.shape, packed.powers.shape) == ((2, 6, 48), (2, 6, 3))
    for expert in range(2):
        assert torch.equal(packed.widened(expert, torch.float32), weight[expert])
    for odd in (2.5, 1 / 3, torch.inf, torch.nan):
        other = weight.clone()
        other[1, 5, 7] = odd
        other[1, 5, 6] = 4.0
        assert to_mxfp4(other) is None
    assert to_mxfp4(weight[..., :48]) is None


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_invalid_expert_number_adds_nothing_to_an_expert_mixture(runner: Any, num_tokens: int) -> None:
    x, ids, shares, weights = random_mixture(num_tokens, 3, 4, 32, 16, Gate(), torch.float32)
    ids[:, 1] = torch.tensor([4, -1, 99, 4, -7, 4])[:num_tokens]
    found = runner.ops.mix_experts(*(each.to(runner.device) for each in (x, ids, shares)), on(runner.device, weights))
    torch.testing.assert_close(found.cpu().double(), expected_mixture(x, ids, shares, weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
def test_nan_in_one_token_does_not_affect_other_tokens_of_an_expert_mixture(runner: Any, gate: Gate) -> None:
    """The limits and squares of a gate do not turn NaN into a number."""
    x, ids, shares, weights = random_mixture(3, 2, 4, 32, 48, gate, torch.float32)
    x[1, 5] = math.nan
    found = runner.ops.mix_experts(*(each.to(runner.device) for each in (x, ids, shares)), on(runner.device, weights))
    assert found.isnan().all(1).tolist() == [False, True, False]
    assert found.isnan().any(1).tolist() == [False, True, False]


def test_unused_experts_are_not_read(runner: Any) -> None:
    """They are NaN, like everything outside the rows and columns of a tile."""
    x, ids, shares, weights = random_mixture(5, 2, 8, 24, 20, Gate(), torch.float32)
    ids.copy_(torch.tensor([[2, 5], [5, 2], [2, 6], [6, 5], [5, 6]]))
    for each in (weights.up, weights.down):
        each[[0, 1, 3, 4, 7]] = math.nan
    found = runner.ops.mix_experts(*(each.to(runner.device) for each in (x, ids, shares)), on(runner.device, weights))
    torch.testing.assert_close(found.cpu().double(), expected_mixture(x, ids, shares, weights), rtol=1e-4, atol=1e-4)


def test_same_tokens_give_the_same_bits(runner: Any) -> None:
    x, ids, shares, weights = random_mixture(12, 4, 6, 64, 40, Gate(), torch.bfloat16)
    on_device = [each.to(runner.device) for each in (x, ids, shares)]
    one, other = (runner.ops.mix_experts(*on_device, on(runner.device, weights)) for _ in range(2))
    assert torch.equal(one, other)


def test_expert_mixture_of_no_tokens_is_empty(runner: Any) -> None:
    x, ids, shares, weights = random_mixture(1, 2, 4, 32, 16, Gate(), torch.float32)
    found = runner.ops.mix_experts(
        *(each[:0].to(runner.device) for each in (x, ids, shares)), on(runner.device, weights)
    )
    assert found.shape == (0, 32)


def test_expert_mixture_names_an_invalid_argument(runner: Any) -> None:
    x, ids, shares, weights = random_mixture(2, 2, 4, 32, 16, Gate(), torch.float32)
    for wrong, name in (
        ((x[:, :16], ids, shares, weights), "x is"),
        ((x.bfloat16(), ids, shares, weights), "x is"),
        ((x, ids[:1], shares, weights), "ids is"),
        ((x, ids.float(), shares, weights), "ids is"),
        ((x, ids, shares[:, :1], weights), "shares is"),
        ((x, ids, shares, weights._replace(up=weights.up[:, 1:])), "up is"),
        ((x, ids, shares, weights._replace(up_bias=weights.up[0, 0])), "up_bias is"),
        ((x, ids, shares, weights._replace(gate=Gate(9))), "kind is 9"),
    ):
        with pytest.raises(ValueError, match=name):
            runner.ops.mix_experts(*wrong)


def test_expert_kernel_tiles_grow_with_the_tokens_and_fit_small_gpus() -> None:
    """A stage has at most two tiles of each operand in the shared memory of an RTX 4090."""
    sizes = [rows_of_tile(tokens, 8, 128, 2) for tokens in (1, 2, 64, 256, 512, 8192)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[1], sizes[-1]) == (1, 16, MAX_ROWS_PER_TILE)
    packed = [rows_of_tile(tokens, 8, 128, 2, is_packed=True) for tokens in (1, 2, 64, 256, 512, 8192)]
    assert packed == [min(size, MAX_ROWS_PER_TILE // 2) for size in sizes]
    for tile_m in (1, 16, 32, 64, MAX_ROWS_PER_TILE):
        for gate in (Gate(), Gate(RELU_SQUARED), None):
            tiles = expert_tiles(tile_m, 2, gate)
            halves = 2 if gate is not None and gate.is_gated else 1
            stage = 2 * tiles.tile_k * (tiles.tile_m + halves * tiles.tile_n)
            assert stage * tiles.num_stages <= MAX_SHARED_BYTES[89]
