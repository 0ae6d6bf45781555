"""Supports models such as RoBERTa, whose first token has a position above 0. The first rows of their position table are
reserved for padding.

If such a model is called without positions, it counts from its first position by itself. If it is called with positions
counted from 0, it does not shift them, so a hook of this module adds the first position. `eager_check` verifies that
both calls give the same result.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from kvscope_engine.model.hf_config import FIRST_POSITION

_ATTRIBUTE: Final = "kvscope_counts_from_first"


def first_position(module: nn.Module) -> int:
    """Return the position of a sequence's first token if the caller passes no positions.

    This is 0, unless the model has position embeddings whose first entries are reserved for padding.
    """
    return max((_start(submodule) for submodule in module.modules()), default=0)


def count_from_first(module: nn.Module) -> None:
    """Add the model's `first_position` to the positions with which `module` is called."""
    config: Any = module.config
    if getattr(module, _ATTRIBUTE, False) or not first_position(module):
        return
    setattr(module, _ATTRIBUTE, True)
    setattr(config, FIRST_POSITION, first_position(module))
    for submodule in module.modules():
        if _start(submodule):
            submodule.register_forward_pre_hook(_shift_positions, with_kwargs=True)


def _shift_positions(submodule: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    positions = kwargs.get("position_ids")
    return None if positions is None else (args, kwargs | {"position_ids": positions + _start(submodule)})


def _start(submodule: Any) -> int:
    if not hasattr(submodule, "create_position_ids_from_input_ids") or not isinstance(submodule.padding_idx, int):
        return 0
    return int(submodule.padding_idx) + 1
