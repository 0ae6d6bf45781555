"""Linear layers with FP8 (e4m3) weights and activations rounded to FP8, with a scale per token.

Decides the format of weights, the rounding of activations, and the implementation: on a GPU torch's scaled matmul if it
supports the card, else our kernel, which dequantizes in registers; on a CPU the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kvscope_kernels.checks import require
from kvscope_kernels.launch import compute_capability
from kvscope_kernels.operation_row import TORCH, TRITON
from kvscope_kernels.quantized_linear.grouped_weight import CHUNK, split_rows
from kvscope_kernels.quantized_linear.triton_product import (
    KernelWeight,
    check_product,
    launch_product,
    new_counters,
    out_type,
)
from kvscope_kernels.triton_language import jit, next_power_of_2, require_triton, tl

E4M3: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
"""Largest number of e4m3."""
_LARGEST = tl.constexpr(LARGEST)
_NAN: Final = 0x7F
"""Bits of NaN in e4m3, without the sign."""
_LARGEST_SCALE: Final = 128.0
"""Upper bound of a weight's scale. The scale times 2^120 must be finite in float32."""
_SMALLEST_SCALE: Final = 2.0**-40
_SMALLEST_SCALE_TL = tl.constexpr(_SMALLEST_SCALE)
_FEW_ROWS: Final = 16
"""Maximum number of rows of activations for our kernel. Torch's tiles are made for more rows."""
_MAX_TILE: Final = 4096
_NUM_TRIAL_OUTPUTS: Final = 64
_MAX_RELATIVE_ERROR: Final = 1e-2
"""Relative error allowed for torch's matmul, whose result is bfloat16."""
_REFUSALS: Final = (RuntimeError, TypeError, ValueError)
"""Errors that torch and its libraries raise for unsupported shapes or cards."""


@dataclass(frozen=True)
class Fp8Weight:
    """Weight in FP8: weight[n, k] = scale[n, k // group] * codes[n, k], in float32."""

    codes: Tensor
    """(outputs, inputs) float8_e4m3fn, without NaN."""
    scale: Tensor
    """(outputs, groups) float32, each below 2^7; groups = ceil(inputs / group)."""
    group: int
    """Number of inputs per group, a multiple of CHUNK. At least `inputs` if each row has a single scale."""

    def __post_init__(self) -> None:
        if self.codes.dim() != 2 or not self.codes.numel() or self.codes.dtype != E4M3:
            require(False, "codes", self.codes, "(outputs, inputs) float8_e4m3fn, neither of them 0,")
        shape = len(self.codes), -(-self.codes.shape[1] // self.group)
        if self.group % CHUNK or self.scale.shape != shape or self.scale.dtype != torch.float32:
            require(False, "scale", self.scale, f"{shape} float32")
        if int((self.codes.view(torch.uint8) & _NAN).max()) == _NAN:  # the kernel would read them as 480
            require(False, "codes", self.codes, "float8_e4m3fn without NaN")
        if not bool((self.scale.abs() < _LARGEST_SCALE).all()):
            require(False, "scale", float(self.scale.abs().max()), f"below {_LARGEST_SCALE}")

    def widened(self) -> Tensor:
        """Return the dequantized weight, (outputs, inputs) float32."""
        return self.scale.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]] * self.codes.float()


def concatenated_fp8(weights: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """Concatenate the outputs of weights. Returns None if they have different groups or inputs."""
    if len({(weight.group, weight.codes.shape[1]) for weight in weights}) > 1:
        return None
    codes = torch.cat([weight.codes.view(torch.uint8) for weight in weights]).view(E4M3)
    return Fp8Weight(codes, torch.cat([weight.scale for weight in weights]), weights[0].group)


def rounded_fp8(weight: Tensor) -> Fp8Weight:
    """Round `weight` (outputs, inputs) to e4m3 with a scale per row. Raises ValueError if it is empty or not finite.

    See docs/internals/decisions/0018-fp8-has-one-scale-per-row.md.
    """
    require(weight.dim() == 2 and weight.numel() > 0, "weight", weight, "(outputs, inputs), neither of them 0,")
    parts = [round_rows_torch(rows) for rows in split_rows(weight.detach())]
    codes, scale = (torch.cat([part[i] for part in parts]) for i in range(2))
    require(bool(torch.isfinite(scale).all()), "weight", weight, "finite numbers")
    return Fp8Weight(codes, scale[:, None], -(-weight.shape[1] // CHUNK) * CHUNK)


def round_rows_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """Reference of `round_rows`: (rows, inputs) -> e4m3 and (rows,) float32 scales such that the largest number of a
    row becomes 448.

    A row that has NaN or infinity dequantizes to all NaN.
    """
    wide = x.float()
    scale = (wide.abs().amax(-1) / LARGEST).clamp(min=_SMALLEST_SCALE)
    return (wide / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scale


def round_rows(x: Tensor, *, widened: bool = False) -> tuple[Tensor, Tensor]:
    """Round (rows, inputs) to e4m3 with (rows,) float32 scales, in one launch.

    With `widened`, the e4m3 numbers are returned in the dtype of x.
    """
    require_triton()
    rows, inputs = x.shape
    codes = torch.empty(x.shape, dtype=x.dtype if widened else E4M3, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        tile = min(_MAX_TILE, next_power_of_2(inputs))
        _round_rows_kernel[(rows,)](x.contiguous(), codes, scale, INPUTS=inputs, TILE=tile, num_warps=8)
    return codes, scale


@jit
def _round_rows_kernel(
    x: tl.tensor, codes: tl.tensor, scale: tl.tensor, INPUTS: tl.constexpr, TILE: tl.constexpr
) -> None:
    """Each program rounds a row, and reads it twice if it is wider than a tile."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([TILE], tl.int32)  # bits of non-negative floats are ordered like the floats, with NaN above
    for start in range(0, INPUTS, TILE):
        k = start + tl.arange(0, TILE)
        numbers = tl.load(x + row * INPUTS + k, mask=k < INPUTS, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    factor = tl.math.div_rn(tl.max(largest, 0).to(tl.float32, bitcast=True), _LARGEST)
    factor = tl.maximum(factor, _SMALLEST_SCALE_TL, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scale + row, factor)
    for start in range(0, INPUTS, TILE):
        k = start + tl.arange(0, TILE)
        numbers = tl.load(x + row * INPUTS + k, mask=k < INPUTS, other=0.0).to(tl.float32)
        scaled = tl.math.div_rn(numbers, factor + tl.zeros([TILE], tl.float32))
        scaled = tl.clamp(scaled, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(codes + row * INPUTS + k, _rounded(scaled).to(codes.dtype.element_ty), mask=k < INPUTS)


@jit
def _rounded(numbers: tl.tensor) -> tl.tensor:
    """Round float32 to the nearest e4m3 number, ties to even, and return it as float32.

    Adds and subtracts a number so large that the excess bits are rounded off. GPUs below compute capability 8.9 have no
    conversion instruction; with this method, the result is the same on all GPUs.
    """
    exponent = (numbers.to(tl.int32, bitcast=True) >> 23) & 0xFF
    step = ((tl.maximum(exponent, 121) + 20) << 23).to(tl.float32, bitcast=True) * 1.5
    return (numbers + step) - step


class TorchFp8:
    """Reference of `GpuFp8` for any device. Slow, because it dequantizes weight and activations for each matmul."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, *, rounds_activations: bool = True) -> None:
        self._weight, self._rounds = weight, rounds_activations
        self._bias = None if bias is None else bias.detach().float()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        weight_tensors = (self._weight.codes, self._weight.scale)
        return weight_tensors if self._bias is None else (*weight_tensors, self._bias)

    def product(self, x: Tensor, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight.T + bias + `add`, (..., inputs) -> (..., outputs). The result has `dtype` if given,
        otherwise the dtype of `add` if given, otherwise that of x.

        Raises ValueError for unsupported arguments.
        """
        check_product(x, add, (self._weight.codes.shape[0], self._weight.codes.shape[1]))
        if self._rounds:
            codes, scale = round_rows_torch(x.reshape(-1, x.shape[-1]))
            sums = linear(codes.float(), self._weight.widened()) * scale[:, None]
        else:
            sums = linear(x.reshape(-1, x.shape[-1]).float(), self._weight.widened())
        sums = (sums if self._bias is None else sums + self._bias).view(*x.shape[:-1], -1)
        return (sums if add is None else sums + add.float()).to(out_type(x, add, dtype))


class GpuFp8:
    """Matmul x @ weight.T with a weight in e4m3, summed in float32. x is rounded to e4m3, too, unless
    `rounds_activations` is False.

    Torch's matmul is tried with this weight at construction, and no longer used once it fails. Our kernel is used for
    few rows, for unrounded x, and wherever torch's matmul does not work. Only one stream at a time may use an instance:
    see `KernelWeight.num_finished`.
    """

    def __init__(
        self, weight: Fp8Weight, bias: Tensor | None, device: torch.device, *, rounds_activations: bool = True
    ) -> None:
        self._rounds = rounds_activations
        self.outputs, self.inputs = weight.codes.shape
        codes = pad(weight.codes.view(torch.uint8), (0, -self.inputs % CHUNK)).contiguous()
        self._codes, self._scale = codes.view(E4M3).to(device), weight.scale.contiguous().to(device)
        self._num_finished, self._group = new_counters(self.outputs, device), weight.group
        self._bias = None if bias is None else bias.detach().float().to(device)
        is_whole = self.inputs % CHUNK == 0 and self.outputs % 16 == 0 and self._scale.shape[1] == 1
        self._is_scaled = rounds_activations and is_whole and multiplies_fp8(device)
        self._report: Callable[[str], object] = lambda line: None
        self._failure = ""
        if self._is_scaled and (why := self._trial_error()):
            self._use_own_kernel(why)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        weight_tensors = (self._codes, self._scale, self._num_finished)
        return weight_tensors if self._bias is None else (*weight_tensors, self._bias)

    def product(self, x: Tensor, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight.T + bias + `add`, (..., inputs) -> (..., outputs). The result has `dtype` if given,
        otherwise the dtype of `add` if given, otherwise that of x.

        Raises ValueError for unsupported arguments.
        """
        check_product(x, add, (self.outputs, self.inputs))
        rows = x.reshape(-1, self.inputs)
        result_dtype = out_type(x, add, dtype)
        if self._is_scaled and len(rows) > _FEW_ROWS and torch.bfloat16 in (x.dtype, result_dtype):
            codes, scale = round_rows(rows)
            try:
                result = _scaled_product(codes, self._codes, scale, self._scale).view(*x.shape[:-1], self.outputs)
            except torch.OutOfMemoryError:
                raise
            except _REFUSALS as error:
                self._use_own_kernel(_describe_error(error))
            else:
                result = result if self._bias is None else result + self._bias
                return (result if add is None else result + add).to(result_dtype)
        multiplied, row_scale = round_rows(rows, widened=True) if self._rounds else (rows, None)
        out = torch.empty((*x.shape[:-1], self.outputs), dtype=result_dtype, device=x.device)
        kernel_weight = KernelWeight(
            self._codes.view(torch.int32), self._scale, None, self._num_finished, 8, self._group
        )
        launch_product(multiplied, kernel_weight, out, self._bias, add, row_scale)
        return out

    def on_failure(self, report: Callable[[str], object]) -> None:
        """Set the callback for a failure of torch's matmul. It is called with one line of text, immediately if
        the matmul has failed already.
        """
        self._report = report
        if self._failure:
            report(self._failure)

    def _use_own_kernel(self, why: str) -> None:
        self._is_scaled = False
        self._failure = (
            f"torch's product of FP8 failed with {self.outputs:,} x {self.inputs:,} weights, kvscope's own kernel "
            f"multiplies instead: {why}"
        )
        self._report(self._failure)

    def _trial_error(self) -> str:
        """Try torch's matmul with this weight. Returns its error, a text if its result is too inaccurate, or ""
        if it works.
        """
        sampled_outputs = slice(None, None, max(1, self.outputs // _NUM_TRIAL_OUTPUTS))
        x = torch.randn(_FEW_ROWS + 1, self.inputs, generator=torch.Generator().manual_seed(0))
        codes, scale = round_rows_torch(x.to(self._codes.device))
        try:
            result = _scaled_product(codes, self._codes, scale, self._scale)[:, sampled_outputs].float()
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as error:
            return _describe_error(error)
        expected = (
            (codes.float() @ self._codes[sampled_outputs].float().T) * scale[:, None] * self._scale[sampled_outputs, 0]
        )
        relative_error = float((result - expected).norm() / expected.norm().clamp(min=_SMALLEST_SCALE))
        return "" if relative_error <= _MAX_RELATIVE_ERROR else f"its result is off by {relative_error:.0%}"


def fp8_product(
    weight: Fp8Weight, bias: Tensor | None, device: torch.device, *, rounds_activations: bool = True
) -> GpuFp8 | TorchFp8:
    """Prepare an FP8 weight for matmuls: with `GpuFp8` on a GPU, with the reference on a CPU."""
    if device.type == "cuda":
        return GpuFp8(weight, bias, device, rounds_activations=rounds_activations)
    return TorchFp8(weight, bias, rounds_activations=rounds_activations)


def fp8_implementation(device: torch.device) -> tuple[str, str]:
    """Return the implementation of matmuls with FP8 weights on a GPU, and the reason. A particular weight may
    use another one, if torch does not support its shape.
    """
    if multiplies_fp8(device):
        return TORCH, f"{TRITON} for up to {_FEW_ROWS} rows, and for weights that torch's product does not take"
    return TRITON, "the GPU has no matrix units for FP8"


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a GPU has matrix units for FP8, so that torch may support FP8 matmuls."""
    return device.type == "cuda" and compute_capability(device) >= 89


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.160}"


def _scaled_product(codes: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor) -> Tensor:
    result: Tensor = torch._scaled_mm(
        codes, weight.t(), scale[:, None], weight_scale.view(1, -1), out_dtype=torch.bfloat16
    )
    return result
