"""KV storage that suits a model: a layer for each of its attention layers, in the shape that was seen there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvscope_engine.model.running.kv_storage import KVStorage, storage_dtype
from kvscope_engine.model.sparse.layers import layer_shapes

if TYPE_CHECKING:
    from kvscope_engine.model.loading.loader import LoadedModel
    from kvscope_engine.model.virtual_memory.memory import PagedMemory


def storage_for_model(
    loaded: LoadedModel,
    num_blocks: int,
    block_size: int,
    kv_cache_dtype: str = "auto",
    *,
    memory: PagedMemory | None = None,
    sparse_decode: float | None = None,
) -> KVStorage:
    """Storage whose layers are those that the model's attention was seen to use."""
    layers = layer_shapes(loaded, sparse_decode)
    dtype = storage_dtype(kv_cache_dtype, loaded.dtype)
    return KVStorage(num_blocks, block_size, layers, dtype, loaded.device, memory=memory)
