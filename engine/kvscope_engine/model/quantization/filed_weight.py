"""Keeps access to a layer's weight as stored in its file, next to the dequantized one, until the layer's kernel is
chosen.

Defines in which attribute of a module the access is stored, and how it passes from projections to the layer that they
are fused into. The weight is read on request; until then it takes no memory beyond the mapped file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn

from kvscope_kernels.quantized_linear.fp8 import Fp8Weight, concatenated_fp8
from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight, concatenated

FiledWeight = Callable[[], GroupedWeight | Fp8Weight]
"""Reads the stored weight of a part of a layer's outputs."""
_PLACE: Final = "kvscope_filed"
_FORMAT: Final = "kvscope_filed_format"


def keep_filed(module: nn.Module, parts: Sequence[FiledWeight]) -> None:
    """Set the stored weights of `module`: `parts` are its consecutive outputs; empty if its file holds unquantized
    weights."""
    place: Any = module
    setattr(place, _PLACE, tuple(parts))


def pass_filed(modules: Sequence[nn.Module], to: nn.Module) -> None:
    """Give `to`, which concatenates the outputs of `modules`, their stored weights; none if any module is
    unquantized."""
    parts = [_parts(module) for module in modules]
    keep_filed(to, [each for some in parts for each in some] if all(parts) else ())


def filed_weight(module: nn.Module) -> GroupedWeight | Fp8Weight | None:
    """Read the stored weight; None if the file holds unquantized weights or parts of different formats."""
    parts = _parts(module)
    weights = [part() for part in parts]
    in_fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    in_groups = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    if in_fp8 and in_groups:
        return None
    return concatenated_fp8(in_fp8) if in_fp8 else concatenated(in_groups) if in_groups else None


def name_format(model: nn.Module, name: str) -> None:
    """Store on `model` the name of the format that its file stores weights in, for display."""
    place: Any = model
    setattr(place, _FORMAT, name)


def filed_format(model: nn.Module) -> str:
    """Return the name that `name_format` stored; empty if none was stored."""
    return str(getattr(model, _FORMAT, ""))


def _parts(module: nn.Module) -> tuple[FiledWeight, ...]:
    parts: tuple[FiledWeight, ...] = getattr(module, _PLACE, ())
    return parts
