"""KV storage that suits a model: a layer for each of its attention layers, in the shape that was seen there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape, storage_dtype
from kvscope_engine.model.kv_cache.layer_groups import LayerGroup, group_layers, one_group
from kvscope_engine.model.runner.sparse_layers import layer_shapes
from kvscope_engine.model.verification.hook_check import LayerCall, check_hook
from kvscope_engine.policy.kv_groups import GroupRule

if TYPE_CHECKING:
    from kvscope_engine.model.kv_cache.virtual_memory.paged_memory import PagedMemory
    from kvscope_engine.model.loaded_model import LoadedModel
    from kvscope_telemetry.engine_config import EngineConfig


def storage_for_model(
    loaded: LoadedModel,
    num_blocks: int,
    block_size: int,
    kv_cache_dtype: str = "auto",
    *,
    memory: PagedMemory | None = None,
    sparse_decode: float | None = None,
    groups: tuple[LayerGroup, ...] | None = None,
) -> KVStorage:
    """Storage whose layers are those that the model's attention was seen to use."""
    layers = layer_shapes(loaded, sparse_decode)
    dtype = storage_dtype(kv_cache_dtype, loaded.dtype)
    own = None if groups is None else [group.layers for group in groups]
    return KVStorage(num_blocks, block_size, layers, dtype, loaded.device, memory=memory, groups=own)


def groups_of_model(config: EngineConfig, loaded: LoadedModel) -> tuple[LayerGroup, ...]:
    """The model's KV groups. One of all layers where blocks are reserved, or chosen among: then none is let go of."""
    calls = check_hook(loaded.module)
    shapes = layer_shapes(loaded, config.sparse_decode)
    if config.allocator != "paged" or config.sparse_decode is not None:
        return one_group(shapes)
    return group_layers(rules_of(calls), shapes, loaded.max_model_len)


def expanded_layers(calls: Sequence[LayerCall]) -> list[LayerShape]:
    """What each layer would keep if it held keys and values of its heads in place of latents; others as they are."""
    return [
        call.shape
        if (latents := call.options.latents) is None
        else replace(call.shape, num_kv_heads=latents.num_heads, head_dim=latents.expanded_dim, latent_dim=0)
        for call in calls
    ]


def rules_of(calls: Sequence[LayerCall]) -> list[GroupRule]:
    """Which earlier tokens each layer was seen to read."""
    return [GroupRule(call.options.sliding_window or 0, call.options.is_chunked) for call in calls]
