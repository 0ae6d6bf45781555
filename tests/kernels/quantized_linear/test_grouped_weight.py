"""Grouped weights of 4 and 8 bits are near the original, concatenated exactly, and refused by name if invalid."""

import pytest
import torch

from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight, concatenated, grouped, rounded


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "allowed"), [(4, 0.09), (8, 0.006)])
@pytest.mark.parametrize("inputs", [64, 70])
def test_rounded_weight_is_near_the_original(bits: int, allowed: float, inputs: int) -> None:
    weight = random_tensor(50, inputs)
    found = rounded(weight, bits)
    assert found.codes.shape == weight.shape
    assert int(found.codes.max()) < 2**bits
    assert float((found.widened() - weight).norm()) <= allowed * float(weight.norm())


def test_weights_that_fit_the_4_bit_grid_are_rounded_without_error() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 4)
    scale, low = torch.tensor([[0.5, 2.0]]).expand(3, 2), torch.tensor([[-3.0, 1.0]]).expand(3, 2)
    on_grid = grouped(codes, scale, low, 4, 32).widened()
    assert torch.equal(rounded(on_grid).widened(), on_grid)
    assert torch.equal(rounded(torch.zeros(2, 32)).widened(), torch.zeros(2, 32))
    assert torch.equal(rounded(torch.full((2, 40), -1.5)).widened(), torch.full((2, 40), -1.5))


def test_outlier_does_not_spoil_its_group() -> None:
    """A clipped range has a smaller squared error than one that includes the outlier."""
    weight = random_tensor(20, 32)
    weight[:, 0] = 4.0
    lowest, highest = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    step = (highest - lowest) / 15
    whole = ((weight - lowest) / step).round() * step + lowest
    assert float((rounded(weight).widened() - weight).norm()) <= float((whole - weight).norm())


def test_joined_weights_are_concatenated_unchanged() -> None:
    one, two = (
        rounded(random_tensor(5, 64)),
        grouped(rounded(random_tensor(3, 64)).codes, random_tensor(3, 2) * 1e-9, random_tensor(3, 2), 4, 32),
    )
    both = concatenated([one, two])
    assert both is not None
    assert torch.equal(both.widened(), torch.cat((one.widened(), two.widened())))
    assert concatenated([one, rounded(random_tensor(5, 64), 8)]) is None
    assert concatenated([one, rounded(random_tensor(5, 64), 4, 64)]) is None


def test_grouped_weight_names_an_invalid_argument() -> None:
    good = rounded(random_tensor(4, 64))
    with pytest.raises(ValueError, match="codes is"):
        GroupedWeight(good.codes.int(), good.scale, good.low, 4, 32)
    with pytest.raises(ValueError, match="scale is"):
        GroupedWeight(good.codes, good.scale[:3], good.low, 4, 32)
    with pytest.raises(ValueError, match="bits and group is"):
        GroupedWeight(good.codes, good.scale, good.low, 3, 32)
    with pytest.raises(ValueError, match="weight is"):
        rounded(torch.zeros(3))
    with pytest.raises(ValueError, match="finite"):
        rounded(torch.full((2, 32), float("nan")))
