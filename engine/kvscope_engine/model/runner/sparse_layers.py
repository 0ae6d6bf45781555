"""Which layers of a model choose among their blocks. Knows neither queries nor blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvscope_engine.model.kv_cache.kv_storage import LayerShape
from kvscope_engine.model.verification.hook_check import LayerCall, check_hook
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel

NUM_FULL_LAYERS: Final = 2
"""The first layers, whose attention is spread over all of the text (Quest, arXiv 2406.10774, section 3.1)."""


def layer_shapes(loaded: LoadedModel, sparse_decode: float | None) -> list[LayerShape]:
    """The shape of each attention layer, with bounds where it is to choose. Raises BadInput where none may."""
    calls = check_hook(loaded.module)
    if sparse_decode is None:
        return [call.shape for call in calls]
    if any(call.shape.latent_dim for call in calls):
        raise BadInput(
            f"sparse_decode={sparse_decode!r} is not accepted with {loaded.info.name}: its layers hold latents, whose"
            " blocks have no bounds"
        )
    shapes = [
        replace(call.shape, bounds_dtype=loaded.dtype) if may_choose(index, call) else call.shape
        for index, call in enumerate(calls)
    ]
    if all(shape.bounds_dtype is None for shape in shapes):
        raise BadInput(
            f"sparse_decode={sparse_decode!r} is not accepted with {loaded.info.name}: behind its first"
            f" {NUM_FULL_LAYERS} layers, which attend in full, none is without a sliding window, attention sinks and"
            " numbers by distance"
        )
    return shapes


def may_choose(index: int, call: LayerCall) -> bool:
    """A window reads little as it is. Sinks are a number a query head, and what is chosen runs a KV head at a time.
    What is added by distance is in no block's bounds."""
    options = call.options
    has_more = options.sinks is not None or options.bias is not None
    return index >= NUM_FULL_LAYERS and options.sliding_window is None and not has_more
