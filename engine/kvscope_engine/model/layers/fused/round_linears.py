"""The exchange of a model's linear layers for ones of fewer bits, once all else is proven. Owns which becomes what.

Rounding changes the model, a little: nothing here is for `fuse` to prove. What stands in the exact model's place is
chosen by whoever loads it (`quantization`).
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
from kvscope_engine.model.quantization.filed_weight import filed_weight
from kvscope_kernels.cpu.weight_buffer import WeightBuffer
from kvscope_kernels.quantized_linear.fp8 import Fp8Weight, rounded_fp8
from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight, rounded

_FEW_OUTPUTS: Final = 128
"""A layer that is this small is a router or a gate: it decides much and costs little."""
_GROUP_OF_8_BITS: Final = 64
_DTYPES: Final = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16, torch.float32, torch.float16)}

Rounded = GroupedLinear | Int8Linear


def round_linears(module: nn.Module, called: Container[nn.Module], quantization: str) -> Counter[int]:
    """Exchange each linear layer of `module`, one after the other; how many there were by their bits.

    Joined ones, those among `called`, and the head, whose results become float32. With `int8` all have 8 bits; with
    `int4` all have 4 but the head, which has 8 where that can be; with `filed` each is what its file holds, where it
    can be read. `a8` is that, else 8 bits. But for `filed`, a CPU rounds activations too. With `fp8` all have e4m3,
    activations too, but the head, which stays. A layer that cannot be what is asked stays as it is.
    See docs/internals/decisions/0017-activations-keep-their-precision.md.
    """
    model: Any = module
    head = model.get_output_embeddings()
    counts: Counter[int] = Counter()
    buffer = WeightBuffer()
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            made = _made(child, called, quantization, buffer, is_head=child is head)
            if made is not None:
                setattr(parent, name, made)
                counts[made.bits] += 1
    return counts


def tell_failures(module: nn.Module, tell: Callable[[str], object]) -> None:
    """`tell` is told of each product that failed and was given up, those of one shape once; now, or when it does."""
    told: set[str] = set()

    def tell_once(line: str) -> None:
        if line not in told:
            told.add(line)
            tell(line)

    for part in module.modules():
        if isinstance(part, GroupedLinear):
            part.tell_failure(tell_once)


def _made(
    child: Any, called: Container[nn.Module], quantization: str, buffer: WeightBuffer, *, is_head: bool
) -> Rounded | None:
    is_large = type(child) is nn.Linear and child.out_features > _FEW_OUTPUTS
    if not ((is_large and is_plain(child, called)) or isinstance(child, FusedLinear | Float32Head)):
        return None
    device = child.weight.device.type
    if child.weight.dtype not in _DTYPES.get(device, ()):
        return None
    dtype = torch.float32 if isinstance(child, Float32Head) else None
    weight = _weight(child, quantization, is_head=is_head)
    if weight is not None:
        return GroupedLinear(child, weight, dtype, buffer, rounds_activations=quantization != "filed")
    rounds = device == "cpu" and quantization not in ("filed", "fp8") and can_round()
    return Int8Linear(child.weight, child.bias, dtype, buffer) if rounds else None


def _weight(child: Any, quantization: str, *, is_head: bool) -> GroupedWeight | Fp8Weight | None:
    """In groups or in FP8, if that is how it is to be kept."""
    on_gpu = child.weight.device.type != "cpu"  # whose 8 bits are in groups as well; a CPU has a product of its own
    filed = filed_weight(child)
    if quantization == "fp8":
        return None if is_head else filed if isinstance(filed, Fp8Weight) else rounded_fp8(child.weight)
    if isinstance(filed, Fp8Weight):
        if quantization == "filed" and on_gpu:
            return filed
        filed = None
    allowed = {"int8": (8,), "int4": (4, 8) if is_head else (4,)}.get(quantization, (4, 8))
    if filed is not None and filed.bits in allowed:
        return filed
    if quantization == "int4" and not is_head:
        return rounded(child.weight)
    return rounded(child.weight, 8, _GROUP_OF_8_BITS) if on_gpu and quantization != "filed" else None
