"""Products with weights of 8 bits: what they are, for every shape; and that a row does not see its neighbours."""

import pytest
import torch

from kvscope_kernels.cpu.library import library
from kvscope_kernels.cpu.linear import Int8Weight, int8_product_torch

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """But for the last bit of a rounding here and there: a step is 1/127 of a group's largest number."""
    error, size = (x.double().square().mean().sqrt() for x in (found.double() - expected, expected))
    assert float(error) <= 2e-3 * float(size)
    assert float((found.double() - expected).abs().max()) <= 5e-2 * float(size)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (64, 64), (100, 70), (130, 333)])
def test_is_the_product_of_rounded_numbers(rows: int, outputs: int, inputs: int) -> None:
    x, weight, bias, add = some(rows, inputs), some(outputs, inputs, seed=1), some(outputs, seed=2), some(rows, outputs)
    expected = int8_product_torch(x, weight) + bias + add
    assert_close(Int8Weight(weight, bias).product(x, add), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_types(dtype: torch.dtype, out: torch.dtype) -> None:
    x, weight = some(2, 5, 96).to(dtype), some(70, 96, seed=1).to(dtype)
    found = Int8Weight(weight).product(x, dtype=out)
    assert (found.shape, found.dtype) == ((2, 5, 70), out)
    expected = int8_product_torch(x, weight)
    allowed = 2e-3 if out == torch.float32 else 1e-2
    assert float((found.double() - expected).norm()) <= allowed * float(expected.norm())
    added = Int8Weight(weight).product(x, found.bfloat16())
    assert added.dtype == torch.bfloat16


def test_a_row_does_not_see_its_neighbours() -> None:
    weight, x = Int8Weight(some(200, 150)), some(23, 150, seed=1) * torch.logspace(-6, 6, 23)[:, None]
    together = weight.product(x)
    for row in range(len(x)):
        assert torch.equal(weight.product(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(poison: float) -> None:
    x = some(3, 70)
    x[1, 66] = poison
    found = Int8Weight(some(65, 70, seed=1)).product(x)
    assert bool(found[1].isnan().all())
    assert bool(found[[0, 2]].isfinite().all())


def test_zeros_and_no_rows() -> None:
    weight = Int8Weight(torch.zeros(70, 64))
    assert torch.equal(weight.product(torch.zeros(2, 64)), torch.zeros(2, 70))
    assert torch.equal(weight.product(some(2, 64)), torch.zeros(2, 70))
    assert weight.product(torch.zeros(0, 64)).shape == (0, 70)


def test_threads_change_nothing() -> None:
    weight, x = Int8Weight(some(300, 100)), some(9, 100, seed=1)
    before = torch.get_num_threads()
    alone = weight.product(x)
    try:
        torch.set_num_threads(2)
        assert torch.equal(weight.product(x), alone)
    finally:
        torch.set_num_threads(before)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="weight is"):
        Int8Weight(torch.zeros(3))
    with pytest.raises(ValueError, match="finite"):
        Int8Weight(torch.full((2, 2), float("nan")))
    weight = Int8Weight(some(8, 8))
    with pytest.raises(ValueError, match="x is"):
        weight.product(torch.zeros(1, 9))
    with pytest.raises(ValueError, match="x is"):
        weight.product(torch.zeros(1, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="add is"):
        weight.product(torch.zeros(1, 8), torch.zeros(2, 8))
