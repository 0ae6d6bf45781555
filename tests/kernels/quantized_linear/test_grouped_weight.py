"""Weights of 4 and 8 bits in groups: near what they were rounded from, joined without a change, refused by name."""

import pytest
import torch

from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight, concatenated, grouped, rounded


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "allowed"), [(4, 0.09), (8, 0.006)])
@pytest.mark.parametrize("inputs", [64, 70])
def test_rounded_is_near(bits: int, allowed: float, inputs: int) -> None:
    weight = some(50, inputs)
    found = rounded(weight, bits)
    assert found.codes.shape == weight.shape
    assert int(found.codes.max()) < 2**bits
    assert float((found.widened() - weight).norm()) <= allowed * float(weight.norm())


def test_what_lies_on_such_numbers_is_kept() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 4)
    scale, low = torch.tensor([[0.5, 2.0]]).expand(3, 2), torch.tensor([[-3.0, 1.0]]).expand(3, 2)
    on_grid = grouped(codes, scale, low, 4, 32).widened()
    assert torch.equal(rounded(on_grid).widened(), on_grid)
    assert torch.equal(rounded(torch.zeros(2, 32)).widened(), torch.zeros(2, 32))
    assert torch.equal(rounded(torch.full((2, 40), -1.5)).widened(), torch.full((2, 40), -1.5))


def test_one_far_off_number_does_not_spoil_its_group() -> None:
    """A range that is cut errs less in the sum of squares than one that reaches to the last number."""
    weight = some(20, 32)
    weight[:, 0] = 4.0
    lowest, highest = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    step = (highest - lowest) / 15
    whole = ((weight - lowest) / step).round() * step + lowest
    assert float((rounded(weight).widened() - weight).norm()) <= float((whole - weight).norm())


def test_joined_is_one_after_the_other() -> None:
    one, two = rounded(some(5, 64)), grouped(rounded(some(3, 64)).codes, some(3, 2) * 1e-9, some(3, 2), 4, 32)
    both = concatenated([one, two])
    assert both is not None
    assert torch.equal(both.widened(), torch.cat((one.widened(), two.widened())))
    assert concatenated([one, rounded(some(5, 64), 8)]) is None
    assert concatenated([one, rounded(some(5, 64), 4, 64)]) is None


def test_bad_input_is_named() -> None:
    good = rounded(some(4, 64))
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
