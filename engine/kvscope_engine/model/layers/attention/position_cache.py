"""Stub cache that supplies positions to attention that counts tokens itself, such as Llama 4's layers without rotation.

transformers' attention computes a position as a token's index in the call plus the length of the cache. With several
sequences in a batch, or prompts in chunks, that is wrong. A stub cache reports, for each token, its position minus its
index as the length, so that the sum is right. Owns the stub and its hooks. `hook_check` detects that the attention
reads the stub; `eager_check` verifies the positions.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from kvscope_engine.model.layers.attention_interface import uses_interface

_ATTRIBUTE: Final = "kvscope_positions"
_COUNTS: Final = "kvscope_counts_positions"


class PositionCache:
    """Stub cache that reports lengths and stores nothing."""

    def __init__(self) -> None:
        self.positions: torch.Tensor | None = None
        """Positions of the running call, shape (1, T); None if the model was called without positions."""
        self.num_queries = 0
        self.attention: nn.Module | None = None
        """Attention module that is currently running."""

    def get_query_offset(self, _: int = 0) -> torch.Tensor:
        """Return `get_seq_length`, under the name that Inkling's attention uses."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, _: int = 0) -> tuple[int, torch.Tensor]:
        """Return the number of keys, and for each key the offset from its index to its position."""
        return query_length, self.get_seq_length()

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Return None: states of convolutions inside attention are not stored."""

    def update_conv_state(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return states

    def get_seq_length(self, _: int = 0) -> torch.Tensor:
        """Return the offset from index to position of each token, (T,)."""
        assert self.positions is not None, "given with positions only"
        self.num_queries += 1
        setattr(self.attention, _COUNTS, True)
        positions = self.positions[0]
        return positions - torch.arange(len(positions), device=positions.device)

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `key` and `value` unchanged, because the block pool stores them."""
        return key, value


def position_cache(module: nn.Module) -> PositionCache | None:
    """Return the stub of `module`; None if its attention does not count tokens."""
    cache: PositionCache | None = getattr(module, _ATTRIBUTE, None)
    return cache


def counts_positions(attention: nn.Module) -> bool:
    """Whether an attention module has read positions from the stub.

    A fused module would not read them, so such a module must not be replaced.
    """
    return getattr(attention, _COUNTS, False)


def install_position_cache(module: nn.Module) -> None:
    """Make attention in `module` use the positions with which the model is called."""
    position_cache = PositionCache()
    setattr(module, _ATTRIBUTE, position_cache)

    def set_positions(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        position_cache.positions = kwargs.get("position_ids")

    def clear_positions(*_: Any) -> None:
        position_cache.positions = None

    def pass_cache(submodule: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if position_cache.positions is None or kwargs.get("past_key_values") is not None:
            return None
        position_cache.attention = submodule
        return args, kwargs | {"past_key_values": position_cache}

    base: Any = module.base_model
    base.register_forward_pre_hook(set_positions, with_kwargs=True)
    base.register_forward_hook(clear_positions, always_call=True)
    for submodule in module.modules():
        if uses_interface(type(submodule)):
            submodule.register_forward_pre_hook(pass_cache, with_kwargs=True)
