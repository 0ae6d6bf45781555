"""Access to Triton. Without Triton, kernel modules can be imported, and launching raises an error with instructions.

`jit` and `tl` replace `triton.jit` and `triton.language`. Kernels run in Triton's interpreter, on CPU tensors, if
TRITON_INTERPRET=1 is set before the kernels are imported.
"""

from collections.abc import Callable
from typing import Any, Protocol

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
    from triton.language.extra.cuda import libdevice  # type: ignore[import-untyped]
except ImportError:  # a CPU-only installation: kernels are defined, never launched
    from types import SimpleNamespace

    triton = libdevice = None
    tl = SimpleNamespace(constexpr=lambda value: value, tensor=None)  # attributes read when kernels are defined

__all__ = [
    "Kernel",
    "add_product",
    "cdiv",
    "fast_log2",
    "is_interpreting",
    "jit",
    "jit_varying",
    "next_power_of_2",
    "require_triton",
    "tl",
]


class Kernel(Protocol):
    """A Triton kernel, launched as `kernel[grid](...)` or called from another kernel."""

    arg_names: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def require_triton() -> None:
    if triton is None:
        raise RuntimeError("the GPU kernels need Triton, which is not installed: pip install triton")


def jit(function: Callable[..., Any]) -> Kernel:
    """Typed version of `triton.jit`. Without Triton, returns a kernel that raises RuntimeError at launch."""
    return jit_varying()(function)


def jit_varying(*, numbers: tuple[str, ...] = (), pointers: tuple[str, ...] = ()) -> Callable[..., Kernel]:
    """Return a decorator like `jit`, for a kernel some of whose arguments vary between launches.

    Triton compiles a variant for each kind of integer argument (1, multiples of 16, and others). It does not do so for
    `numbers`, nor for the alignment of `pointers`, which must be read element by element.
    """

    def make(function: Callable[..., Any]) -> Kernel:
        if triton is None:
            return _AbsentKernel()
        options = {"do_not_specialize": list(numbers), "do_not_specialize_on_alignment": list(pointers)}
        kernel: Kernel = triton.jit(**options)(function)
        return kernel

    return make


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, whose bf16 `tl.dot` is wrong (triton issue 11584)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


class _AbsentKernel:
    def __init__(self) -> None:
        self.arg_names: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        require_triton()


@jit
def add_product(
    weights: "tl.tensor", numbers: "tl.tensor", sums: "tl.tensor", UPCAST_DOT: "tl.constexpr"
) -> "tl.tensor":
    """Return `sums` (N, M) float32 plus the matmul of weights (N, K) and numbers (M, K). With `UPCAST_DOT`,
    computed in float32.
    """
    if UPCAST_DOT:
        weights = weights.to(tl.float32)
        numbers = numbers.to(tl.float32)
    return tl.dot(weights, tl.trans(numbers), sums, input_precision="ieee")


@jit
def fast_log2(x: "tl.tensor", IS_INTERPRETED: "tl.constexpr") -> "tl.tensor":
    """Return log2, computed by a single instruction, with an error of at most 2^-22. `tl.log2` takes about
    fifteen instructions.
    """
    if IS_INTERPRETED:
        return tl.log2(x)
    else:  # noqa: RET505
        return libdevice.fast_log2f(x)
