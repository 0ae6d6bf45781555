"""Products of FP8 with FP8: rows are rounded like in torch, and every implementation is compared with float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvscope_kernels.quantized_linear import fp8
from kvscope_kernels.quantized_linear.fp8 import (
    E4M3,
    Fp8Weight,
    GpuFp8,
    TorchFp8,
    round_rows,
    round_rows_torch,
    rounded_fp8,
)

ALLOWED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(outputs: int, inputs: int, group: int) -> Fp8Weight:
    """Return a weight with a scale for every `group` inputs, or for each row if it is 0."""
    if not group:
        return rounded_fp8(random_tensor(outputs, inputs, seed=1) * 0.02)
    scale = random_tensor(outputs, -(-inputs // group), seed=4).abs() + 0.01
    return Fp8Weight((random_tensor(outputs, inputs, seed=1) * 100).to(E4M3), scale, group)


def kernel_error(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the relative errors of the sums and of the result; a module function, so that the interpreter finds it."""
    rows, outputs, inputs, group = shape
    x, weight = (random_tensor(rows, inputs) * 3).to(dtype), random_weight(outputs, inputs, group)
    bias, add = random_tensor(outputs, seed=2), random_tensor(rows, outputs, seed=3)
    kernel = GpuFp8(weight, bias, torch.device(device))
    torch.use_deterministic_algorithms(True)  # outputs and partial sums start as NaN
    try:
        found = kernel.product(x.to(device), add.to(device)).cpu(), kernel.product(x.to(device)).cpu()
    finally:
        torch.use_deterministic_algorithms(False)
    codes, scale = round_rows_torch(x)
    expected = codes.double() * scale[:, None].double() @ weight.widened().double().T + bias.double()
    assert (found[0].dtype, found[1].dtype) == (torch.float32, dtype)
    size = expected.norm()
    return (found[0] - expected - add).norm() / size, (found[1] - expected).norm() / size


def count_different_roundings(x: torch.Tensor, *, widened: bool) -> torch.Tensor:
    """Count the numbers and scales that the kernel rounds in another way than torch."""
    codes, scale = round_rows(x, widened=widened)
    expected, expected_scale = round_rows_torch(x)
    return (codes.float() != expected.float()).sum() + (scale != expected_scale).sum()


SHAPES = [(1, 40, 64, 0), (17, 70, 200, 64), (3, 33, 70, 0), (1, 33, 1300, 128), (5, 70, 700, 0)]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", list(ALLOWED), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interpreted_fp8_kernel_equals_the_float64_product(
    shape: tuple[int, int, int, int], dtype: torch.dtype, interpret: Callable[..., Any]
) -> None:
    of_sums, of_result = interpret(kernel_error, shape, dtype)
    rounds_weight = shape[0] > 1 and dtype != torch.float32  # for the matrix units; a single row is summed without them
    assert float(of_sums) <= (ALLOWED[dtype] if rounds_weight else 1e-5)
    assert float(of_result) <= ALLOWED[dtype]


@pytest.mark.interpreter
@pytest.mark.parametrize("widened", [True, False])
def test_rows_are_rounded_like_in_torch(widened: bool, interpret: Callable[..., Any]) -> None:
    x = random_tensor(4, 5000) * torch.tensor([1e-3, 1.0, 300.0, 0.0])[:, None]
    x[1, :40] = torch.arange(40) * 2.0**-10
    assert int(interpret(count_different_roundings, x, widened=widened)) == 0


def rows_of_nan(x: torch.Tensor, *, widened: bool) -> torch.Tensor:
    """Return which rows contain NaN once dequantized by the kernel; a module function, so that the interpreter finds
    it. Some infinite numbers become NaN there.
    """
    codes, scale = round_rows(x, widened=widened)
    is_number = (codes.float() * scale[:, None]).isfinite()
    assert torch.equal(is_number.any(1), is_number.all(1))
    return ~is_number.any(1)


def with_nan(device: str = "cpu") -> torch.Tensor:
    """Return rows of which 1 and 2 have a NaN and row 3 an infinite number."""
    x = random_tensor(5, 5000).to(device)
    x[1, 4999], x[2, 3], x[3, 7] = torch.nan, -torch.nan, -torch.inf
    return x


@pytest.mark.interpreter
@pytest.mark.parametrize("widened", [True, False])
def test_nan_in_one_row_does_not_affect_other_rows_of_an_fp8_product(
    widened: bool, interpret: Callable[..., Any]
) -> None:
    expected = [False, True, True, True, False]
    assert interpret(rows_of_nan, with_nan(), widened=widened).tolist() == expected
    codes, scale = round_rows_torch(with_nan())
    assert (codes.float() * scale[:, None]).isnan().all(1).tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("widened", [True, False])
def test_nan_in_one_row_does_not_affect_other_rows_of_an_fp8_product_on_a_gpu(widened: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert rows_of_nan(with_nan("cuda"), widened=widened).tolist() == [False, True, True, True, False]


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of the largest tensor made, in bytes."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.num_bytes = max(self.num_bytes, made.nbytes)
        return made


def test_large_weight_is_not_widened_at_once() -> None:
    weight = random_tensor(6000, 2048).bfloat16()
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        found = rounded_fp8(weight)
    assert largest.num_bytes <= weight.nbytes
    codes, scale = round_rows_torch(weight)
    assert torch.equal(found.codes.float(), codes.float())
    assert torch.equal(found.scale[:, 0], scale)


@pytest.mark.parametrize("fails", ["at once", "later", "in its result"])
def test_product_that_torch_refuses_is_computed_by_the_kernel(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's product runs on a CPU like on a GPU; the kernel only records that it was called."""
    plain, calls, ours, told = torch._scaled_mm, list[int](), list[int](), list[str]()

    def scaled(codes: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        calls.append(len(codes))
        if fails == "at once" or (fails == "later" and len(calls) > 2):
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return plain(codes, *args, **more) * (1.5 if fails == "in its result" else 1.0)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(fp8, "round_rows", lambda x, *, widened=False: round_rows_torch(x))
    monkeypatch.setattr(fp8, "launch_product", lambda x, *rest: ours.append(len(x)))
    weight, x = random_weight(96, 64, 0), random_tensor(20, 64, seed=3).bfloat16()
    product = GpuFp8(weight, None, torch.device("cpu"))
    assert calls == [17], "tried with the weight itself"
    product.on_failure(told.append)
    if fails == "later":
        expected = TorchFp8(weight, None).product(x).float()
        assert float((product.product(x).float() - expected).norm()) <= 1e-2 * float(expected.norm())
        assert (ours, told) == ([], [])
    for _ in range(2):
        product.product(x)
    assert ours == [20, 20]
    assert len(calls) == (3 if fails == "later" else 1), "not asked again"
    assert len(told) == 1
    why = "its result is off by 50%" if fails == "in its result" else "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED"
    assert told[0].startswith("torch's product of FP8 failed with 96 x 64 weights")
    assert told[0].endswith(why)


def test_memory_shortage_does_not_disable_the_product_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(fp8, "round_rows", lambda x, *, widened=False: round_rows_torch(x))
    product, plain = GpuFp8(random_weight(96, 64, 0), None, torch.device("cpu")), torch._scaled_mm
    x = random_tensor(20, 64).bfloat16()
    expected = product.product(x)

    def short(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "_scaled_mm", short)
    with pytest.raises(torch.OutOfMemoryError):
        product.product(x)
    monkeypatch.setattr(torch, "_scaled_mm", plain)
    assert torch.equal(product.product(x), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ALLOWED), ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (8, 4096, 4096, 0), (70, 4096, 4096, 0), (70, 512, 1024, 128)], ids=str)
def test_fp8_kernel_equals_float64_on_a_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert max(map(float, kernel_error(shape, dtype, "cuda"))) <= 1e-2


def test_torch_fp8_product_is_near_the_exact_product() -> None:
    x, weight, bias = random_tensor(2, 5, 70), random_weight(33, 70, 0), random_tensor(33, seed=2)
    found = TorchFp8(weight, bias).product(x)
    plain = x @ (random_tensor(33, 70, seed=1) * 0.02).T + bias
    assert float((found - plain).norm()) <= 0.04 * float((plain - bias).norm())
    assert TorchFp8(weight, bias).product(x, found.bfloat16()).dtype == torch.bfloat16


def test_fp8_product_names_an_invalid_argument() -> None:
    good = random_weight(4, 64, 0)
    with pytest.raises(ValueError, match="codes is"):
        Fp8Weight(good.codes.float(), good.scale, 64)
    some_nan = good.codes.float()
    some_nan[1, 2] = -torch.nan
    with pytest.raises(ValueError, match="without NaN"):
        Fp8Weight(some_nan.to(E4M3), good.scale, 64)
    with pytest.raises(ValueError, match="scale is"):
        Fp8Weight(good.codes, good.scale[:3], 64)
    with pytest.raises(ValueError, match="finite"):
        rounded_fp8(torch.full((2, 32), float("inf")))
    with pytest.raises(ValueError, match="x is"):
        TorchFp8(good, None).product(torch.zeros(1, 65))
