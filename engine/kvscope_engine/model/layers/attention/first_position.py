"""Embeddings whose first position is not 0 but follows the padding's (RoBERTa), in a table with as many extra rows.

Such a model counts from there if it is called without positions, as it was trained, and `eager_check` compares with
that; given positions are used as they are. Owns the hook that shifts them.
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
    return max((_start(part) for part in module.modules()), default=0)


def count_from_first(module: nn.Module) -> None:
    """Shift the positions that `module` is called with by its `first_position`."""
    config: Any = module.config
    if getattr(module, _ATTRIBUTE, False) or not first_position(module):
        return
    setattr(module, _ATTRIBUTE, True)
    setattr(config, FIRST_POSITION, first_position(module))
    for part in module.modules():
        if _start(part):
            part.register_forward_pre_hook(_move, with_kwargs=True)


def _move(part: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    given = kwargs.get("position_ids")
    return None if given is None else (args, kwargs | {"position_ids": given + _start(part)})


def _start(part: Any) -> int:
    if not hasattr(part, "create_position_ids_from_input_ids") or not isinstance(part.padding_idx, int):
        return 0
    return int(part.padding_idx) + 1
