"""Creates KV storage for a model: one layer per attention layer, in the shape recorded when its attention was
traced."""

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
    layers = layer_shapes(loaded, sparse_decode)
    dtype = storage_dtype(kv_cache_dtype, loaded.dtype)
    group_layers = None if groups is None else [group.layers for group in groups]
    return KVStorage(num_blocks, block_size, layers, dtype, loaded.device, memory=memory, groups=group_layers)


def groups_of_model(config: EngineConfig, loaded: LoadedModel) -> tuple[LayerGroup, ...]:
    """Return the model's KV groups.

    This is a single group if the allocator reserves memory, or if decodes choose their blocks (sparse attention),
    because blocks outside a window are then not freed.
    """
    calls = check_hook(loaded.module)
    shapes = layer_shapes(loaded, config.sparse_decode)
    if config.allocator != "paged" or config.sparse_decode is not None:
        return one_group(shapes)
    return group_layers(rules_of(calls), shapes, loaded.max_model_len)


def expanded_layers(calls: Sequence[LayerCall]) -> list[LayerShape]:
    """Return the layer shapes with keys and values of all heads in place of latents; other layers unchanged."""
    return [
        call.shape
        if (latents := call.options.latents) is None
        else replace(call.shape, num_kv_heads=latents.num_heads, head_dim=latents.expanded_dim, latent_dim=0)
        for call in calls
    ]


def rules_of(calls: Sequence[LayerCall]) -> list[GroupRule]:
    """Return the rule for which earlier tokens each layer reads, from the recorded call of its attention."""
    return [GroupRule(call.options.sliding_window or 0, call.options.is_chunked) for call in calls]
