"""Linear layers on prepacked weights. On a CPU, oneDNN reads a weight in its own blocked layout about twice as fast as
a plain weight.

Decides whether packing is possible. The plain weight is released after packing, so memory does not grow. A weight that
other code shares (an embedding tied to the head) cannot be released and stays in memory in addition to its packed copy.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from kvscope_engine.model.layers.fused.released_weight import ReleasedWeight
from kvscope_engine.model.platforms.device import dtype_name
from kvscope_engine.model.quantization.stored_weight import concatenate_stored_weight_readers
from kvscope_kernels import ops_for
from kvscope_kernels.linear.skinny_linear import FewRows

BATCH_HINT: Final = 8
"""Number of tokens per call that is passed to oneDNN, which chooses the layout accordingly. Values from 1 to 32
make no measurable difference.
"""
_CPU_CAPABILITIES: Final = ("AVX2", "AVX512", "AMX")


class PackedLinear(nn.Module):
    """Linear layer `x @ weight.T + bias` with the weight in oneDNN's layout. Inference only."""

    fuses_add: Final = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.num_bytes = weight.numel() * weight.itemsize
        self.weight = ReleasedWeight(weight)
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), BATCH_HINT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y

    def forward_add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return `forward(x) + other`, computed in one pass if `other` has the dtype of x."""
        if other.dtype != x.dtype:
            return other + self.forward(x)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._packed, self.bias, "add")
        return y


class FusedLinear(nn.Module):
    """Counterpart of `PackedLinear` with a plain weight, for devices and dtypes that are not packed."""

    fuses_add: Final = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.few_rows: FewRows | None = None
        """Numbers of rows for which kvscope's kernel computes the matmul instead of cuBLAS; None for the
        default of `skinny_linear.linear`.
        """
        self._ops = ops_for(weight.device.type)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.linear(x, self.weight, self.bias, few_rows=self.few_rows)

    def forward_add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.forward(x) + other


FastLinear = PackedLinear | FusedLinear


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this CPU has oneDNN kernels for `dtype`, tested on a small layer."""
    return not packing_refusal(dtype, device)


def packing_refusal(dtype: torch.dtype, device: torch.device) -> str:
    """Return why weights of `dtype` are not packed for oneDNN on `device`; empty if they are packed."""
    if device.type != "cpu":
        return "oneDNN runs on CPUs only"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch is built without oneDNN"
    if torch.backends.cpu.get_cpu_capability() not in _CPU_CAPABILITIES:
        return f"the CPU has none of {', '.join(_CPU_CAPABILITIES)}"
    if not _supports_dtype(dtype):
        return f"oneDNN does not compute in {dtype_name(dtype)} on this CPU"
    return "" if _is_product_correct(dtype) else "oneDNN failed a small product that was tried"


def fast_linear(linears: Sequence[nn.Linear], packed: bool) -> FastLinear:
    """Return one layer whose output is the concatenated outputs of `linears`, which have the same input."""
    weight = linears[0].weight if len(linears) == 1 else torch.cat([plain.weight for plain in linears])
    bias = _fused_bias(linears)
    fused = PackedLinear(weight, bias) if packed else FusedLinear(weight, bias)
    concatenate_stored_weight_readers(linears, fused)
    return fused


def pack_linears(module: nn.Module, called: Container[nn.Module]) -> None:
    """Replace every plain `nn.Linear` in `called` by a packed one.

    A layer that was never called is not replaced, because other code may read its weight.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and is_plain(child, called):
                setattr(parent, name, PackedLinear(child.weight, child.bias))


def is_plain(child: nn.Module, called: Container[nn.Module]) -> bool:
    """Whether a linear layer was called and has no hooks. A packed layer would not run hooks."""
    return child in called and not child._forward_hooks and not child._forward_pre_hooks


def pack_fused(module: nn.Module) -> None:
    """Pack every remaining `FusedLinear`: the layers that were meant to be quantized and could not be."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FusedLinear):
                setattr(parent, name, PackedLinear(child.weight, child.bias))


def packed_bytes(module: nn.Module) -> int:
    """Return the bytes of packed weights, which are not parameters of the module."""
    return sum(child.num_bytes for child in module.modules() if isinstance(child, PackedLinear))


def _fused_bias(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    biases: list[torch.Tensor] = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
    ]
    return torch.cat(biases)


def _supports_dtype(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _is_product_correct(dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` gives the right result for `dtype`. This is tested because it uses internal torch
    operations.
    """
    generator = torch.Generator().manual_seed(0)
    x, other = torch.rand(3, 32, generator=generator).to(dtype), torch.rand(3, 48, generator=generator).to(dtype)
    weight, bias = torch.rand(48, 32, generator=generator).to(dtype), torch.rand(48, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            actual = PackedLinear(weight, bias).forward_add(x, other)
    except (RuntimeError, AttributeError, TypeError):
        return False
    expected = functional.linear(x.double(), weight.double(), bias.double()) + other.double()
    return bool(torch.allclose(actual.double(), expected, rtol=2e-2, atol=2e-2))
