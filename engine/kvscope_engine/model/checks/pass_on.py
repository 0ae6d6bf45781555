"""Handing the step's `PagedContext` past layers that do not pass keywords on to their attention.

Owns two hooks a layer: one keeps what the layer was given, the other gives it to the attention inside. A context lies
on its layer only while that runs. Models of other architectures are left alone.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from kvscope_engine.model.loading.support import uses_interface

KEYWORD: Final = "paged"


def pass_on(module: nn.Module) -> None:
    """From now on the attention in each layer of `module` gets the keyword that the layer was called with."""
    for layer in list(module.modules()):
        for child in layer.children():
            if uses_interface(type(child)):
                _bridge(layer, child)


def _bridge(layer: nn.Module, attention: nn.Module) -> None:
    held: dict[str, Any] = {}

    def keep(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        held.update((name, kwargs[name]) for name in (KEYWORD,) if name in kwargs)

    def give(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, held | kwargs

    def drop(*_: Any) -> None:
        held.clear()

    layer.register_forward_pre_hook(keep, with_kwargs=True)
    attention.register_forward_pre_hook(give, with_kwargs=True)
    layer.register_forward_hook(drop, always_call=True)
