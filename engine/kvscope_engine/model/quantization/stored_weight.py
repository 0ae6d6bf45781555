"""Attaches to a module functions that read its weight as stored in the checkpoint, until a kernel is chosen.

Defines the attribute that stores these readers, and how they pass from projections to the layer into which the
projections are fused. A weight is read on request; until then it takes no memory beyond the mapped file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn

from kvscope_kernels.quantized_linear.fp8 import Fp8Weight, concatenated_fp8
from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight, concatenated

StoredWeightReader = Callable[[], GroupedWeight | Fp8Weight]
"""Function that reads the stored weight of some consecutive outputs of a linear layer."""
_WEIGHTS_ATTRIBUTE: Final = "kvscope_stored_weight_readers"
_FORMAT_ATTRIBUTE: Final = "kvscope_stored_format"


def set_stored_weight_readers(module: nn.Module, weights: Sequence[StoredWeightReader]) -> None:
    """Set the functions that read the stored weight of `module`, each for some of its outputs, in order.

    `weights` is empty if the checkpoint stores the weight unquantized.
    """
    target: Any = module
    setattr(target, _WEIGHTS_ATTRIBUTE, tuple(weights))


def concatenate_stored_weight_readers(modules: Sequence[nn.Module], target: nn.Module) -> None:
    """Set the readers of `modules` on `target`, a layer that concatenates their outputs. Sets none if any of
    the modules has no reader.
    """
    weights_by_module = [_stored_weights(module) for module in modules]
    set_stored_weight_readers(
        target, [weight for weights in weights_by_module for weight in weights] if all(weights_by_module) else ()
    )


def read_stored_weight(module: nn.Module) -> GroupedWeight | Fp8Weight | None:
    """Read the stored weight of `module`.

    Returns None if the checkpoint stores it unquantized, or in different formats for different outputs.
    """
    parts = _stored_weights(module)
    weights = [part() for part in parts]
    in_fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    in_groups = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    if in_fp8 and in_groups:
        return None
    return concatenated_fp8(in_fp8) if in_fp8 else concatenated(in_groups) if in_groups else None


def name_format(model: nn.Module, name: str) -> None:
    target: Any = model
    setattr(target, _FORMAT_ATTRIBUTE, name)


def stored_format(model: nn.Module) -> str:
    """Return the display name of the checkpoint's weight format that `name_format` stored; empty if none was stored."""
    return str(getattr(model, _FORMAT_ATTRIBUTE, ""))


def _stored_weights(module: nn.Module) -> tuple[StoredWeightReader, ...]:
    parts: tuple[StoredWeightReader, ...] = getattr(module, _WEIGHTS_ATTRIBUTE, ())
    return parts
