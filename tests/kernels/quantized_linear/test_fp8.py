"""Products of FP8 with FP8: rows rounded as torch rounds them, each implementation against float64."""

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


def rows_of_nan(x: torch.Tensor, *, widened: bool) -> torch.Tensor:
    """Which rows have no number by the kernel, once widened; in a function of the module, so that the interpreter finds
    it. That makes infinite numbers of some NaN."""
    codes, scale = round_rows(x, widened=widened)
    is_number = (codes.float() * scale[:, None]).isfinite()
    assert torch.equal(is_number.any(1), is_number.all(1))
    return ~is_number.any(1)


def with_nan(device: str = "cpu") -> torch.Tensor:
    """In rows 1 and 2; an infinite number in row 3."""
    x = some(5, 5000).to(device)
    x[1, 4999], x[2, 3], x[3, 7] = torch.nan, -torch.nan, -torch.inf
    return x


@pytest.mark.interpreter
@pytest.mark.parametrize("widened", [True, False])
def test_what_is_no_number_stays_none(widened: bool, interpret: Callable[..., Any]) -> None:
    expected = [False, True, True, True, False]
    assert interpret(rows_of_nan, with_nan(), widened=widened).tolist() == expected
    codes, scale = round_rows_torch(with_nan())
    assert (codes.float() * scale[:, None]).isnan().all(1).tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("widened", [True, False])
def test_what_is_no_number_stays_none_on_a_gpu(widened: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert rows_of_nan(with_nan("cuda"), widened=widened).tolist() == [False, True, True, True, False]


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that is made, in bytes."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.num_bytes = max(self.num_bytes, made.nbytes)
        return made


def test_a_large_weight_is_not_made_wide_at_once() -> None:
    weight = some(6000, 2048).bfloat16()
    with Largest() as largest:  # type: ignore[no-untyped-call]
        found = rounded_fp8(weight)
    assert largest.num_bytes <= weight.nbytes
    codes, scale = round_rows_torch(weight)
    assert torch.equal(found.codes.float(), codes.float())
    assert torch.equal(found.scale[:, 0], scale)


@pytest.mark.parametrize("fails", ["at once", "later", "in its result"])
def test_what_torch_cannot_multiply_goes_to_our_kernel(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's product on a CPU, which is as that of a GPU; our kernel only says that it was asked."""
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
    weight, x = some_weight(96, 64, 0), some(20, 64, seed=3).bfloat16()
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


def test_memory_that_is_short_is_no_reason_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(fp8, "round_rows", lambda x, *, widened=False: round_rows_torch(x))
    product, plain = GpuFp8(some_weight(96, 64, 0), None, torch.device("cpu")), torch._scaled_mm
    x = some(20, 64).bfloat16()
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
