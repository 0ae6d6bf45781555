"""Products with grouped weights: each implementation equals float64, and each device gets its own."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_kernels import grouped_product as product
from kvscope_kernels.cpu.grouped import NativeGrouped
from kvscope_kernels.cpu.library import library
from kvscope_kernels.grouped_product import TorchGrouped, grouped_product
from kvscope_kernels.quantized_linear.grouped_weight import rounded
from kvscope_kernels.quantized_linear.triton_product import TritonGrouped, num_splits, product_tiles

CPU = torch.device("cpu")


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ALLOWED = {torch.float32: (1e-5, 1e-5), torch.float16: (1e-5, 1e-3), torch.bfloat16: (1e-2, 1e-2)}
"""Allowed errors of float32 sums and of results in the dtype. Triton's interpreter truncates bfloat16, a GPU rounds."""


def triton_product(
    shape: tuple[int, int, int, int], dtype: torch.dtype, bits: int, device: str = "cpu"
) -> torch.Tensor:
    """Return the error relative to the allowed one; a module function, so that the interpreter's process finds it."""
    rows, outputs, inputs, group = shape
    x, weight = random_tensor(rows, inputs).to(dtype), rounded(random_tensor(outputs, inputs, seed=1), bits, group)
    bias, add = random_tensor(outputs, seed=2), random_tensor(rows, outputs, seed=3)
    kernel = TritonGrouped(weight, bias, torch.device(device))
    torch.use_deterministic_algorithms(True)  # outputs and partial sums start as NaN
    try:
        found = kernel.product(x.to(device), add.to(device)).cpu(), kernel.product(x.to(device)).cpu()
    finally:
        torch.use_deterministic_algorithms(False)
    wide = weight.widened() if rows == 1 else weight.widened().to(dtype)  # a single row needs no weights of its dtype
    expected = x.double() @ wide.double().T + bias.double()
    assert (found[0].dtype, found[1].dtype) == (torch.float32, dtype)
    of_sums, of_result = ALLOWED[dtype]
    errors = [(found[0] - expected - add).norm() / of_sums, (found[1] - expected).norm() / of_result]
    return torch.div(torch.stack(errors), expected.norm())


SHAPES = [(1, 40, 64, 32), (17, 70, 200, 64), (3, 33, 70, 128), (1, 33, 2300, 64), (5, 70, 700, 32), (130, 40, 96, 32)]
"""Shapes of products; the fourth and the fifth are split between programs."""


@pytest.mark.interpreter
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", list(ALLOWED), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interpreted_grouped_product_kernel_equals_float64(
    shape: tuple[int, int, int, int], dtype: torch.dtype, bits: int, interpret: Callable[..., Any]
) -> None:
    assert float(interpret(triton_product, shape, dtype, bits).max()) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", list(ALLOWED), ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (70, 4096, 4096, 128)], ids=str)
def test_grouped_product_kernel_equals_float64_on_a_gpu(
    shape: tuple[int, int, int, int], dtype: torch.dtype, bits: int
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert float(triton_product(shape, dtype, bits, "cuda").max()) <= 1


@pytest.mark.parametrize("bits", [4, 8])
def test_grouped_product_never_splits_its_inputs_into_an_empty_part(bits: int) -> None:
    for rows, outputs, inputs in itertools.product((1, 2, 16, 64, 512), (64, 576, 4096), range(64, 20000, 608)):
        tiles = product_tiles(rows, bits, 2)
        turns = -(-inputs // (tiles.tile_u * 128 // bits))
        splits = num_splits(rows, outputs, inputs, bits, tiles, 132)
        each = -(-turns // splits)
        assert (splits - 1) * each < turns, (rows, outputs, inputs, splits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_grouped_product_equals_float64(dtype: torch.dtype) -> None:
    x, weight, bias = (
        random_tensor(2, 5, 70).to(dtype),
        rounded(random_tensor(33, 70, seed=1)),
        random_tensor(33, seed=2),
    )
    expected = x.double() @ weight.widened().to(dtype).double().T + bias
    reference = TorchGrouped(weight, bias)
    found = reference.product(x, dtype=torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert reference.product(x, found.bfloat16()).dtype == torch.bfloat16


def test_grouped_product_on_a_cpu_uses_c_if_available_and_torch_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = rounded(random_tensor(8, 32))
    assert isinstance(grouped_product(weight, None, CPU), NativeGrouped if library() else TorchGrouped)
    monkeypatch.setattr(product, "library", lambda: None)
    assert isinstance(grouped_product(weight, None, CPU), TorchGrouped)


def test_grouped_product_names_an_invalid_argument() -> None:
    weight = TorchGrouped(rounded(random_tensor(8, 32)), None)
    with pytest.raises(ValueError, match="x is"):
        weight.product(torch.zeros(1, 33))
    with pytest.raises(ValueError, match="add is"):
        weight.product(torch.zeros(1, 32), torch.zeros(1, 9))
