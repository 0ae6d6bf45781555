"""What an allocator other than `paged` changes of options that were left to the engine. Asked for, they are refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvscope_engine.config import EngineConfig
from kvscope_engine.model.loading.loader import LoadedModel
from kvscope_engine.policy.allocation.allocators import fitting_model_len


def bent_to_allocator(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> tuple[LoadedModel, list[str]]:
    """The model with a length that the pool can reserve, and a line for each thing that is not as without the
    allocator."""
    notes = []
    if config.allocator != "paged" and config.enable_prefix_caching is None:
        notes.append(f"prefix caching is off: allocator={config.allocator!r} shares no blocks")
    length = fitting_model_len(config.allocator, num_blocks, config.block_size, loaded.max_model_len)
    if config.max_model_len is not None or length == loaded.max_model_len:
        return loaded, notes
    notes.append(
        f"max_model_len is {length} and not the model's {loaded.max_model_len}: allocator={config.allocator!r} reserves"
        f" that much in a row for each request, and a pool of {num_blocks} blocks has no longer run"
        " (a smaller --max-model-len lets more requests run at once)"
    )
    info = msgspec.structs.replace(loaded.info, max_model_len=length)
    return replace(loaded, info=info, max_model_len=length), notes
