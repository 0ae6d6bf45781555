"""Decides which layers of a model choose among their blocks (sparse attention)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvscope_engine.model.kv_cache.kv_storage import LayerShape
from kvscope_engine.model.verification.hook_check import LayerCall, check_hook
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel

NUM_FULL_LAYERS: Final = 2
"""Number of first layers that always attend to all blocks, since their attention is spread over the whole text (Quest,
arXiv 2406.10774, section 3.1).
"""


def layer_shapes(loaded: LoadedModel, sparse_decode: float | None) -> list[LayerShape]:
    """Return the shape of each attention layer, with key bounds for layers that choose blocks.

    Raises:
        BadInput: `sparse_decode` is set and no layer can choose.
    """
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
    """Whether the layer at `index` may choose among its blocks.

    Excluded are layers with a sliding window, which read little already; with attention sinks, which are one number per
    query head while blocks are chosen per KV head; and with a bias by distance, which is not part of a block's bounds.
    """
    options = call.options
    has_extra_scores = options.sinks is not None or options.bias is not None
    return index >= NUM_FULL_LAYERS and options.sliding_window is None and not has_extra_scores
