"""Replaces a model's linear layers by quantized ones, after all checks of the model. Decides how each layer is
replaced.

Rounding changes the model's output slightly, so `fuse` does not check these layers. The user's option `quantization`
decides what replaces the exact weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.layers.fused.float32_head import Float32Head
from kvscope_engine.model.layers.fused.grouped_linear import GroupedLinear
from kvscope_engine.model.layers.fused.int8_linear import Int8Linear, can_round
from kvscope_engine.model.layers.fused.packed_linear import FusedLinear, is_plain
from kvscope_engine.model.quantization.stored_weight import read_stored_weight
from kvscope_kernels.cpu.weight_buffer import WeightBuffer
from kvscope_kernels.quantized_linear.fp8 import Fp8Weight, rounded_fp8
from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight, rounded

_MAX_EXACT_OUTPUTS: Final = 128
"""Layers with at most this many outputs are not quantized, because they are routers or gates, which are
sensitive to rounding and cheap.
"""
_GROUP_OF_8_BITS: Final = 64
_DTYPES: Final = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16, torch.float32, torch.float16)}

Rounded = GroupedLinear | Int8Linear


def round_linears(module: nn.Module, called: Container[nn.Module], quantization: str) -> Counter[int]:
    """Replace the linear layers of `module` by quantized ones. Returns the number of replaced layers for each bit
    width.

    Replaces fused layers, layers in `called`, and the head; the result of a `Float32Head` stays float32. The new weight
    format depends on `quantization`:

    - "int8": 8 bits.
    - "int4": 4 bits. The head uses the checkpoint's weights of 4 or 8 bits if there are any; otherwise it is rounded to
      8 bits where that is possible.
    - "as_stored": the quantized weights of the checkpoint, for layers that have readable ones. Activations are not
    rounded.
    - "a8": the quantized weights of the checkpoint, and 8 bits for the other layers.
    - "fp8": e4m3 weights and activations; the head is not replaced.

    On a CPU, activations are rounded too, except with "as_stored". A layer that does not support the format is not
    replaced. See docs/internals/decisions/0017-activations-keep-their-precision.md.
    """
    model: Any = module
    head = model.get_output_embeddings()
    counts: Counter[int] = Counter()
    buffer = WeightBuffer()
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            replacement = _replacement(child, called, quantization, buffer, is_head=child is head)
            if replacement is not None:
                setattr(parent, name, replacement)
                counts[replacement.bits] += 1
    return counts


def watch_fp8_failures(module: nn.Module, report: Callable[[str], object]) -> None:
    """Call `report` with one line of text when torch's FP8 matmul fails in a layer of `module`, which then uses
    kvscope's own kernel. Failures that happened before this call are reported immediately.

    Equal lines, such as those for layers of one shape, are reported once.
    """
    reported: set[str] = set()

    def report_once(line: str) -> None:
        if line not in reported:
            reported.add(line)
            report(line)

    for submodule in module.modules():
        if isinstance(submodule, GroupedLinear):
            submodule.on_failure(report_once)


def _replacement(
    child: Any, called: Container[nn.Module], quantization: str, buffer: WeightBuffer, *, is_head: bool
) -> Rounded | None:
    is_large = type(child) is nn.Linear and child.out_features > _MAX_EXACT_OUTPUTS
    if not ((is_large and is_plain(child, called)) or isinstance(child, FusedLinear | Float32Head)):
        return None
    device = child.weight.device.type
    if child.weight.dtype not in _DTYPES.get(device, ()):
        return None
    dtype = torch.float32 if isinstance(child, Float32Head) else None
    weight = _weight(child, quantization, is_head=is_head)
    if weight is not None:
        return GroupedLinear(child, weight, dtype, buffer, rounds_activations=quantization != "as_stored")
    rounds = device == "cpu" and quantization not in ("as_stored", "fp8") and can_round()
    return Int8Linear(child.weight, child.bias, dtype, buffer) if rounds else None


def _weight(child: Any, quantization: str, *, is_head: bool) -> GroupedWeight | Fp8Weight | None:
    """Return the grouped or FP8 weight for the replacement of `child`; None if the layer gets neither."""
    on_gpu = child.weight.device.type != "cpu"  # GPUs use groups for 8 bits too; CPUs have an own int8 product
    stored = read_stored_weight(child)
    if quantization == "fp8":
        return None if is_head else stored if isinstance(stored, Fp8Weight) else rounded_fp8(child.weight)
    if isinstance(stored, Fp8Weight):
        if quantization == "as_stored" and on_gpu:
            return stored
        stored = None
    allowed = {"int8": (8,), "int4": (4, 8) if is_head else (4,)}.get(quantization, (4, 8))
    if stored is not None and stored.bits in allowed:
        return stored
    if quantization == "int4" and not is_head:
        return rounded(child.weight)
    return rounded(child.weight, 8, _GROUP_OF_8_BITS) if on_gpu and quantization != "as_stored" else None
