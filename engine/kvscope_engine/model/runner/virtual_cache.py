"""Creates the address space and the memory of an engine with the `virtual` allocator, from its configuration and
model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvscope_engine.model.kv_cache.kv_storage import storage_dtype, tensor_block_bytes
from kvscope_engine.model.kv_cache.virtual_memory.paged_memory import PagedMemory, page_bytes, reserve
from kvscope_engine.model.runner.sparse_layers import layer_shapes
from kvscope_engine.policy.allocation.address_space import AddressSpace, address_space
from kvscope_telemetry.engine_config import EngineConfig

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class VirtualCache:
    """Layout of the KV cache's address space, and the memory reserved for it."""

    space: AddressSpace
    memory: PagedMemory


def virtual_cache(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> VirtualCache | None:
    """Reserve an address space for a pool with the memory of `num_blocks` blocks. Returns None for other allocators.

    Raises:
        BadInput: One request may need more memory than `num_blocks` blocks have.
        KvscopeError: The operating system or the driver refuses.
    """
    if config.allocator != "virtual":
        return None
    layers = layer_shapes(loaded, config.sparse_decode)
    block_bytes = tensor_block_bytes(layers, config.block_size, storage_dtype(config.kv_cache_dtype, loaded.dtype))
    size = page_bytes(loaded.device)
    space = address_space(
        block_bytes=block_bytes,
        page_bytes=size,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=loaded.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    return VirtualCache(space, reserve(block_bytes, space, size, loaded.device))
