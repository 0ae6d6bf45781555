"""A layer's weight as its file holds it, kept at hand beside the plain one until it is known how the layer will run.

Owns where that is kept on a module, and its way from projections to the one they are joined to. It is read only when
it is asked for: until then it costs no memory beyond what is mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn

from kvscope_kernels.quantized_linear.fp8 import Fp8Weight, joined_fp8
from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight, joined

FiledWeight = Callable[[], GroupedWeight | Fp8Weight]
"""Reads a part of the outputs."""
_PLACE: Final = "kvscope_filed"
_FORMAT: Final = "kvscope_filed_format"


def keep_filed(module: nn.Module, parts: Sequence[FiledWeight]) -> None:
    """`parts` are the outputs of `module`, one after the other; none: its file holds plain numbers."""
    place: Any = module
    setattr(place, _PLACE, tuple(parts))


def pass_filed(modules: Sequence[nn.Module], to: nn.Module) -> None:
    """`to` has the outputs of all `modules`; where one of them has plain numbers, it has too."""
    parts = [_parts(module) for module in modules]
    keep_filed(to, [each for some in parts for each in some] if all(parts) else ())


def filed_weight(module: nn.Module) -> GroupedWeight | Fp8Weight | None:
    """Read now; None if the file holds plain numbers, or parts that differ in kind."""
    parts = _parts(module)
    weights = [part() for part in parts]
    in_fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    in_groups = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    if in_fp8 and in_groups:
        return None
    return joined_fp8(in_fp8) if in_fp8 else joined(in_groups) if in_groups else None


def name_format(model: nn.Module, name: str) -> None:
    """What the weights of `model` are called in its file, for people."""
    place: Any = model
    setattr(place, _FORMAT, name)


def filed_format(model: nn.Module) -> str:
    """Empty if nobody named it."""
    return str(getattr(model, _FORMAT, ""))


def _parts(module: nn.Module) -> tuple[FiledWeight, ...]:
    parts: tuple[FiledWeight, ...] = getattr(module, _PLACE, ())
    return parts
