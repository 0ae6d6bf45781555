"""Products of FP8 with FP8: rows rounded as torch rounds them, each implementation against float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_kernels.grouped.fp8 import E4M3, Fp8Weight, GpuFp8, TorchFp8, round_rows, round_rows_torch, rounded_fp8

ALLOWED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_weight(outputs: int, inputs: int, group: int) -> Fp8Weight:
    """With a scale for each `group` inputs; 0: for each row."""
    if not group:
        return rounded_fp8(some(outputs, inputs, seed=1) * 0.02)
    scale = some(outputs, -(-inputs // group), seed=4).abs() + 0.01
    return Fp8Weight((some(outputs, inputs, seed=1) * 100).to(E4M3), scale, group)


def kernel_error(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of sums and of a result, over their size; in a function of the module, so that the interpreter finds it."""
    rows, outputs, inputs, group = shape
    x, weight = (some(rows, inputs) * 3).to(dtype), some_weight(outputs, inputs, group)
    bias, add = some(outputs, seed=2), some(rows, outputs, seed=3)
    kernel = GpuFp8(weight, bias, torch.device(device))
    torch.use_deterministic_algorithms(True)  # outputs and partial sums begin as NaN
    try:
        found = kernel.product(x.to(device), add.to(device)).cpu(), kernel.product(x.to(device)).cpu()
    finally:
        torch.use_deterministic_algorithms(False)
    codes, scale = round_rows_torch(x)
    expected = codes.double() * scale[:, None].double() @ weight.widened().double().T + bias.double()
    assert (found[0].dtype, found[1].dtype) == (torch.float32, dtype)
    size = expected.norm()
    return (found[0] - expected - add).norm() / size, (found[1] - expected).norm() / size


def rounded_apart(x: torch.Tensor, *, widened: bool) -> torch.Tensor:
    """How many numbers and scales the kernel rounds otherwise than torch."""
    codes, scale = round_rows(x, widened=widened)
    expected, expected_scale = round_rows_torch(x)
    return (codes.float() != expected.float()).sum() + (scale != expected_scale).sum()


SHAPES = [(1, 40, 64, 0), (17, 70, 200, 64), (3, 33, 70, 0), (1, 33, 1300, 128), (5, 70, 700, 0)]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", list(ALLOWED), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel(shape: tuple[int, int, int, int], dtype: torch.dtype, interpret: Callable[..., Any]) -> None:
    of_sums, of_result = interpret(kernel_error, shape, dtype)
    rounds_weight = shape[0] > 1 and dtype != torch.float32  # for the matrix units; one row is summed without them
    assert float(of_sums) <= (ALLOWED[dtype] if rounds_weight else 1e-5)
    assert float(of_result) <= ALLOWED[dtype]


@pytest.mark.interpreter
@pytest.mark.parametrize("widened", [True, False])
def test_rows_are_rounded_as_torch_rounds_them(widened: bool, interpret: Callable[..., Any]) -> None:
    x = some(4, 5000) * torch.tensor([1e-3, 1.0, 300.0, 0.0])[:, None]
    x[1, :40] = torch.arange(40) * 2.0**-10
    assert int(interpret(rounded_apart, x, widened=widened)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ALLOWED), ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (8, 4096, 4096, 0), (70, 4096, 4096, 0), (70, 512, 1024, 128)], ids=str)
def test_the_kernel_on_a_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert max(map(float, kernel_error(shape, dtype, "cuda"))) <= 1e-2


def test_the_reference() -> None:
    x, weight, bias = some(2, 5, 70), some_weight(33, 70, 0), some(33, seed=2)
    found = TorchFp8(weight, bias).product(x)
    plain = x @ (some(33, 70, seed=1) * 0.02).T + bias
    assert float((found - plain).norm()) <= 0.04 * float((plain - bias).norm())
    assert TorchFp8(weight, bias).product(x, found.bfloat16()).dtype == torch.bfloat16


def test_bad_input_is_named() -> None:
    good = some_weight(4, 64, 0)
    with pytest.raises(ValueError, match="codes is"):
        Fp8Weight(good.codes.float(), good.scale, 64)
    with pytest.raises(ValueError, match="scale is"):
        Fp8Weight(good.codes, good.scale[:3], 64)
    with pytest.raises(ValueError, match="finite"):
        rounded_fp8(torch.full((2, 32), float("inf")))
    with pytest.raises(ValueError, match="x is"):
        TorchFp8(good, None).product(torch.zeros(1, 65))
