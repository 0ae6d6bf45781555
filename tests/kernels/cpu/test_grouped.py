"""Products with grouped weights are correct for every shape, and a row does not depend on other rows."""

import pytest
import torch

from kvscope_kernels.cpu.grouped import NativeGrouped, native_product_torch
from kvscope_kernels.cpu.library import library
from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight, grouped, rounded

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(outputs: int, inputs: int, bits: int = 4, group: int = 32) -> GroupedWeight:
    """Return a weight of random codes, with scales that fit in float16."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    groups = -(-inputs // group)
    scale, low = (
        random_tensor(outputs, groups, seed=2).half().float(),
        random_tensor(outputs, groups, seed=3).half().float(),
    )
    return grouped(codes, scale, low, bits, group)


def rounding_weight(weight: GroupedWeight, bias: torch.Tensor | None = None) -> NativeGrouped:
    return NativeGrouped(weight, bias, rounds_activations=True)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare up to the last bit of some roundings: a step is 1/127 of the largest number of a chunk."""
    error, size = (x.double().square().mean().sqrt() for x in (found.double() - expected, expected))
    assert float(error) <= 2e-3 * float(size)
    assert float((found.double() - expected).abs().max()) <= 5e-2 * float(size)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 10, 101])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(1, 1, 32), (64, 64, 32), (100, 70, 64), (130, 333, 128)])
def test_cpu_grouped_product_equals_that_of_rounded_activations_and_weights(
    bits: int, rows: int, outputs: int, inputs: int, group: int
) -> None:
    x, bias, add = random_tensor(rows, inputs), random_tensor(outputs, seed=2), random_tensor(rows, outputs)
    weight = random_weight(outputs, inputs, bits, group)
    expected = native_product_torch(x, weight) + bias + add
    assert_close(rounding_weight(weight, bias).product(x, add), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 10, 101])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(1, 1, 32), (64, 64, 32), (100, 70, 64), (130, 333, 512)])
def test_activations_are_not_rounded_by_default(
    dtype: torch.dtype, bits: int, rows: int, outputs: int, inputs: int, group: int
) -> None:
    """The result equals the product with the dequantized weight, up to float32 summation errors."""
    x, bias, add = (
        random_tensor(rows, inputs).to(dtype),
        random_tensor(outputs, seed=2),
        random_tensor(rows, outputs).to(dtype),
    )
    weight = random_weight(outputs, inputs, bits, group)
    expected = x.double() @ weight.widened().double().T
    found = NativeGrouped(weight).product(x, dtype=torch.float32)
    size = x.double().abs() @ weight.widened().double().abs().T
    assert float(((found.double() - expected).abs() / size).max()) <= 2e-6
    added = NativeGrouped(weight, bias).product(x, add.float()).double() - (expected + bias + add)
    assert float((added.abs() / (size + bias.abs() + add.abs())).max()) <= 2e-6
    in_its_type = NativeGrouped(weight, bias).product(x, add)
    assert torch.equal(in_its_type, NativeGrouped(weight, bias).product(x, add.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_cpu_grouped_product_supports_bfloat16_and_float32_inputs_and_outputs(
    dtype: torch.dtype, out: torch.dtype
) -> None:
    x, weight = random_tensor(2, 5, 96).to(dtype), rounded(random_tensor(70, 96, seed=1).to(dtype))
    found = rounding_weight(weight).product(x, dtype=out)
    assert (found.shape, found.dtype) == ((2, 5, 70), out)
    expected = native_product_torch(x, weight)
    allowed = 2e-3 if out == torch.float32 else 1e-2
    assert float((found.double() - expected).norm()) <= allowed * float(expected.norm())
    assert NativeGrouped(weight).product(x, found.bfloat16()).dtype == torch.bfloat16


def test_scales_outside_float16_are_kept_in_float32() -> None:
    x, narrow = random_tensor(3, 64), random_weight(40, 64)
    wide = grouped(narrow.codes, narrow.scale.float() * 1e6 / 3, narrow.low.float(), 4, 32)
    assert wide.scale.dtype == torch.float32
    assert_close(rounding_weight(wide).product(x), native_product_torch(x, wide))
    exact = x.double() @ wide.widened().double().T
    assert float((NativeGrouped(wide).product(x).double() - exact).norm()) <= 1e-6 * float(exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_cpu_grouped_product_of_a_row_does_not_depend_on_other_rows_or_threads(
    bits: int, rounds: bool, dtype: torch.dtype
) -> None:
    weight = NativeGrouped(random_weight(200, 150, bits), rounds_activations=rounds)
    x = (random_tensor(23, 150, seed=1) * torch.logspace(-6, 6, 23)[:, None]).to(dtype)
    together, before = weight.product(x), torch.get_num_threads()
    for row in range(len(x)):
        assert torch.equal(weight.product(x[row : row + 1])[0], together[row])
    try:
        torch.set_num_threads(2)
        assert torch.equal(weight.product(x), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(100, 70, 64), (130, 333, 512), (40, 1000, 32)])
def test_cpu_grouped_product_has_the_bits_of_single_rows_in_every_block_of_a_prompt(
    bits: int, outputs: int, inputs: int, group: int
) -> None:
    """With AMX, tiles multiply several rows; a prompt of 300 has more than one block, and a last tile of 8 rows."""
    weight = NativeGrouped(random_weight(outputs, inputs, bits, group), random_tensor(outputs))
    x, add = random_tensor(300, inputs).bfloat16(), random_tensor(300, outputs, seed=1).bfloat16()
    together = weight.product(x, add)
    single = [weight.product(x[row : row + 1], add[row : row + 1]) for row in range(len(x))]
    assert torch.equal(together, torch.cat(single))


def test_tiles_and_onednn_use_the_tile_registers_in_turns() -> None:
    x, plain = random_tensor(40, 96).bfloat16(), random_tensor(64, 96, seed=1).bfloat16()
    weight, expected = NativeGrouped(random_weight(70, 96)), torch.nn.functional.linear(x, plain)
    first = weight.product(x)
    for _ in range(3):
        assert torch.equal(torch.nn.functional.linear(x, plain), expected)
        assert torch.equal(weight.product(x), first)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_cpu_grouped_product_of_a_non_finite_row_does_not_affect_other_rows(poison: float, rounds: bool) -> None:
    x = random_tensor(3, 70)
    x[1, 66] = poison
    found = NativeGrouped(random_weight(65, 70), rounds_activations=rounds).product(x)
    assert not bool(found[1].isfinite().any())
    assert bool(found[[0, 2]].isfinite().all())


def test_cpu_grouped_product_of_zeros_is_zero_and_of_no_rows_is_empty() -> None:
    weight = NativeGrouped(random_weight(70, 64))
    assert torch.equal(weight.product(torch.zeros(2, 64)), torch.zeros(2, 70))
    assert weight.product(torch.zeros(0, 64)).shape == (0, 70)


def test_cpu_grouped_product_names_an_invalid_argument() -> None:
    weight = NativeGrouped(random_weight(8, 8))
    with pytest.raises(ValueError, match="x is"):
        weight.product(torch.zeros(1, 9))
    with pytest.raises(ValueError, match="x is"):
        weight.product(torch.zeros(1, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="add is"):
        weight.product(torch.zeros(1, 8), torch.zeros(2, 8))
