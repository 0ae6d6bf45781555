"""RMSNorm, alone and of a sum: every implementation equals float64 for every dtype and odd sizes."""

from typing import Any

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def random_tensor(*shape: int, dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 576), (1, 1), (2, 3, 100), (5, 2048)], ids=str)
def test_rms_norm_equals_the_float64_reference(runner: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = (random_tensor(*each, dtype=dtype, seed=1, device=runner.device) for each in (shape, shape[-1:]))
    eps = torch.tensor(1e-5, device=runner.device)
    out = runner.ops.rms_norm(x, weight.float(), eps, dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact(x, weight, 1e-5), rtol=1e-2, atol=1e-3)


def test_zeros_stay_zeros_and_rows_are_independent(runner: Any) -> None:
    x = torch.zeros(4, 64, device=runner.device)
    x[2] = 1e-3
    out = runner.ops.rms_norm(x, torch.ones(64, device=runner.device), torch.tensor(1e-6, device=x.device), x.dtype)
    assert not out[[0, 1, 3]].any()
    torch.testing.assert_close(out[2], torch.full_like(x[2], 1e-3 / 2e-6**0.5))


def test_rms_norm_supports_rows_of_a_wider_tensor(runner: Any) -> None:
    x = random_tensor(6, 200, dtype=torch.float32, seed=2, device=runner.device)[:, 40:168]
    weight = torch.ones(128, device=runner.device)
    out = runner.ops.rms_norm(x, weight, torch.tensor(1e-5, device=runner.device), torch.float32)
    torch.testing.assert_close(out.double(), exact(x, weight, 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2, (torch.float32,) * 2], ids=str
)
def test_norm_of_a_sum_equals_the_reference(runner: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The residual is in float32 with 16-bit products, or all have one dtype; the inputs are unchanged."""
    x, delta = (random_tensor(5, 576, dtype=dtype, seed=i, device=runner.device) for i, dtype in enumerate(dtypes))
    given = x.clone(), delta.clone()
    weight = random_tensor(576, dtype=torch.float32, seed=7, device=runner.device)
    total, normed = runner.ops.add_rms_norm(x, delta, weight, torch.tensor(1e-5, device=x.device), dtypes[1])
    assert (total.dtype, normed.dtype) == dtypes
    assert torch.equal(x, given[0])
    assert torch.equal(delta, given[1])
    torch.testing.assert_close(total, (x.float() + delta.float()).to(dtypes[0]), rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(normed.double(), exact(total, weight, 1e-5), rtol=1e-2, atol=1e-2)


def test_rms_norm_of_no_rows_is_empty(runner: Any) -> None:
    x, weight = torch.zeros(0, 64, device=runner.device), torch.ones(64, device=runner.device)
    eps = torch.tensor(1e-5, device=runner.device)
    assert runner.ops.rms_norm(x, weight, eps, torch.bfloat16).shape == (0, 64)
    assert [part.shape for part in runner.ops.add_rms_norm(x, x, weight, eps, x.dtype)] == [(0, 64)] * 2


def test_rms_norm_names_an_invalid_argument() -> None:
    from kvscope_kernels.rms_norm import add_rms_norm, rms_norm

    x, weight, eps = torch.zeros(2, 64), torch.ones(64), torch.tensor(1e-5)
    with pytest.raises(ValueError, match=r"weight is \(63,\) .* \(64,\) float32"):
        rms_norm(x, weight[:63], eps, x.dtype)
    with pytest.raises(ValueError, match="eps is"):
        rms_norm(x, weight, eps.double(), x.dtype)
    with pytest.raises(ValueError, match="x is"):
        rms_norm(x.int(), weight, eps, x.dtype)
    with pytest.raises(ValueError, match="delta is"):
        add_rms_norm(x, x[:1], weight, eps, x.dtype)
