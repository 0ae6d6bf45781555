"""Products with 8-bit weights are correct for every shape, and a row does not depend on other rows."""

import pytest
import torch

from kvscope_kernels.cpu.library import library
from kvscope_kernels.cpu.linear import Int8Weight, int8_product_torch

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare up to the last bit of some roundings: a step is 1/127 of the largest number of a group."""
    error, size = (x.double().square().mean().sqrt() for x in (found.double() - expected, expected))
    assert float(error) <= 2e-3 * float(size)
    assert float((found.double() - expected).abs().max()) <= 5e-2 * float(size)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (64, 64), (100, 70), (130, 333)])
def test_cpu_int8_product_equals_that_of_rounded_activations_and_weights(rows: int, outputs: int, inputs: int) -> None:
    x, weight, bias, add = (
        random_tensor(rows, inputs),
        random_tensor(outputs, inputs, seed=1),
        random_tensor(outputs, seed=2),
        random_tensor(rows, outputs),
    )
    expected = int8_product_torch(x, weight) + bias + add
    assert_close(Int8Weight(weight, bias).product(x, add), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_cpu_int8_product_supports_bfloat16_and_float32_inputs_and_outputs(
    dtype: torch.dtype, out: torch.dtype
) -> None:
    x, weight = random_tensor(2, 5, 96).to(dtype), random_tensor(70, 96, seed=1).to(dtype)
    found = Int8Weight(weight).product(x, dtype=out)
    assert (found.shape, found.dtype) == ((2, 5, 70), out)
    expected = int8_product_torch(x, weight)
    allowed = 2e-3 if out == torch.float32 else 1e-2
    assert float((found.double() - expected).norm()) <= allowed * float(expected.norm())
    added = Int8Weight(weight).product(x, found.bfloat16())
    assert added.dtype == torch.bfloat16


def test_cpu_int8_product_of_a_row_does_not_depend_on_other_rows() -> None:
    weight, x = Int8Weight(random_tensor(200, 150)), random_tensor(23, 150, seed=1) * torch.logspace(-6, 6, 23)[:, None]
    together = weight.product(x)
    for row in range(len(x)):
        assert torch.equal(weight.product(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_cpu_int8_product_of_a_non_finite_row_does_not_affect_other_rows(poison: float) -> None:
    x = random_tensor(3, 70)
    x[1, 66] = poison
    found = Int8Weight(random_tensor(65, 70, seed=1)).product(x)
    assert bool(found[1].isnan().all())
    assert bool(found[[0, 2]].isfinite().all())


def test_cpu_int8_product_of_zeros_is_zero_and_of_no_rows_is_empty() -> None:
    weight = Int8Weight(torch.zeros(70, 64))
    assert torch.equal(weight.product(torch.zeros(2, 64)), torch.zeros(2, 70))
    assert torch.equal(weight.product(random_tensor(2, 64)), torch.zeros(2, 70))
    assert weight.product(torch.zeros(0, 64)).shape == (0, 70)


def test_cpu_int8_product_does_not_depend_on_the_number_of_threads() -> None:
    weight, x = Int8Weight(random_tensor(300, 100)), random_tensor(9, 100, seed=1)
    before = torch.get_num_threads()
    alone = weight.product(x)
    try:
        torch.set_num_threads(2)
        assert torch.equal(weight.product(x), alone)
    finally:
        torch.set_num_threads(before)


def test_cpu_int8_product_names_an_invalid_argument() -> None:
    with pytest.raises(ValueError, match="weight is"):
        Int8Weight(torch.zeros(3))
    with pytest.raises(ValueError, match="finite"):
        Int8Weight(torch.full((2, 2), float("nan")))
    weight = Int8Weight(random_tensor(8, 8))
    with pytest.raises(ValueError, match="x is"):
        weight.product(torch.zeros(1, 9))
    with pytest.raises(ValueError, match="x is"):
        weight.product(torch.zeros(1, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="add is"):
        weight.product(torch.zeros(1, 8), torch.zeros(2, 8))
