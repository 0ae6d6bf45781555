"""The gate of a feed-forward block: every implementation equals torch in float64."""

from typing import Any

import pytest
import torch

from kvscope_kernels.gated_activation import ACTIVATIONS, GELU_TANH, SILU, gated_activation


@pytest.mark.parametrize("kind", [SILU, GELU_TANH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 96), (1, 2), (2, 2, 3000)], ids=str)
def test_gated_activation_equals_the_float64_reference(
    runner: Any, kind: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    both = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 4).to(runner.device, dtype)
    size = shape[-1] // 2
    out = runner.ops.gated_activation(both, kind)
    wide = both.double()
    assert out.dtype == dtype
    expected = ACTIVATIONS[kind](wide[..., :size]) * wide[..., size:]
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("kind", [SILU, GELU_TANH])
def test_gated_activation_of_extreme_inputs_gives_no_nan(runner: Any, kind: int) -> None:
    """An overflow of the exponential does not become NaN."""
    gate = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4])
    both = torch.cat((gate, torch.full_like(gate, 2.0)))[None].to(runner.device)
    out = runner.ops.gated_activation(both, kind)
    torch.testing.assert_close(out.cpu()[0], gate.clamp(min=0.0) * 2.0)


def test_gated_activation_names_an_invalid_argument() -> None:
    with pytest.raises(ValueError, match="both is"):
        gated_activation(torch.zeros(2, 3), SILU)
    with pytest.raises(ValueError, match="kind is 7"):
        gated_activation(torch.zeros(2, 4), 7)
