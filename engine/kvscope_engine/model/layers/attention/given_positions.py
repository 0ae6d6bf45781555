"""Positions for attention that counts its tokens itself: Llama 4's layers without rotation, whose queries are scaled by
how far into the text they stand.

transformers' attention adds to a token's place in the call how many tokens the cache holds already. Where sequences
share a batch, or a prompt comes in pieces, that is no position. Given a stand-in for a cache that holds, for each
token, as many tokens as its position is past its place, it counts to the positions. Owns the stand-in and its hooks;
that the attention asks it is seen by `hook_check`, that the positions are right is proven by `eager_check`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.layers.attention_interface import uses_interface

_ATTRIBUTE: Final = "kvscope_positions"
_COUNTS: Final = "kvscope_counts_positions"


class GivenPositions:
    """A stand-in for a cache: says how many tokens it holds, and keeps none."""

    def __init__(self) -> None:
        self.positions: torch.Tensor | None = None
        """(1, T) of the call that runs; None where the model was given none, and counts its tokens itself."""
        self.num_asked = 0
        self.attention: nn.Module | None = None
        """That which runs."""

    def get_query_offset(self, _: int = 0) -> torch.Tensor:
        """The same, as Inkling's attention asks."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, _: int = 0) -> tuple[int, torch.Tensor]:
        """How many keys there are, and what makes the place of each its position."""
        return query_length, self.get_seq_length()

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """There is none: what a convolution inside of attention keeps is not kept here."""

    def update_conv_state(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """What was given."""
        return states

    def get_seq_length(self, _: int = 0) -> torch.Tensor:
        """(T,): what makes a token's place its position."""
        assert self.positions is not None, "given with positions only"
        self.num_asked += 1
        setattr(self.attention, _COUNTS, True)
        positions = self.positions[0]
        return positions - torch.arange(len(positions), device=positions.device)

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What was given: the pool keeps it."""
        return key, value


def given_positions(module: nn.Module) -> GivenPositions | None:
    """Where the attention of `module` takes positions from; None where it does not count tokens."""
    found: GivenPositions | None = getattr(module, _ATTRIBUTE, None)
    return found


def counts_positions(attention: nn.Module) -> bool:
    """Whether an attention module was seen to ask where its tokens stand: no form that does not may replace it."""
    return getattr(attention, _COUNTS, False)


def give_positions(module: nn.Module) -> None:
    """From now on the attention in `module` counts to the positions that the model is called with."""
    given = GivenPositions()
    setattr(module, _ATTRIBUTE, given)

    def take(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        given.positions = kwargs.get("position_ids")

    def drop(*_: Any) -> None:
        given.positions = None

    def give(part: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if given.positions is None or kwargs.get("past_key_values") is not None:
            return None
        given.attention = part
        return args, kwargs | {"past_key_values": given}

    base: Any = module.base_model
    base.register_forward_pre_hook(take, with_kwargs=True)
    base.register_forward_hook(drop, always_call=True)
    for part in module.modules():
        if uses_interface(type(part)):
            part.register_forward_pre_hook(give, with_kwargs=True)
