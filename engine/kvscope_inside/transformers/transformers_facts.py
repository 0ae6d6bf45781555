"""Builds the `Hello` message of transformers' continuous batching (model, pool, KV groups, device), and maps blocks to
ledger rows.

Only reads transformers' objects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self

from msgspec.structs import replace

from kvscope_inside.host_facts import device_info, dtype_name, model_info
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    DeviceInfo,
    Hello,
    KVGroup,
    MemoryBreakdown,
    ModelInfo,
)
from kvscope_telemetry.messages.validity import MAX_BLOCK_SIZE
from kvscope_telemetry.transport.host_id import host_id

_KINDS: Final = {"full_attention": "full", "sliding_attention": "window"}
RESERVED_SECTORS: Final = 2
"""Number of reserved sectors at the start of the memory. Padding is read from and written to them."""


@dataclass(frozen=True, slots=True)
class LedgerRows:
    """Maps blocks of each KV group to rows of the ledger.

    transformers divides its memory into sectors and assigns each sector to one group while needed. A sector contains as
    many blocks of its group as fit. In the ledger, each sector has `per_sector` rows, in memory order: as many as the
    group with the smallest blocks needs. A group with larger blocks uses only the first rows of its sectors; no block
    corresponds to the remaining rows.
    """

    blocks_per_sector: tuple[int, ...]
    """Number of blocks per sector, by KV group."""
    per_sector: int
    num_sectors: int
    """Number of sectors, including the reserved ones."""

    @classmethod
    def of(cls, cache: Any) -> Self:
        """Return the mapping of a PagedAttentionCache."""
        blocks = tuple(int(each.blocks_per_sector) for each in cache.cache_allocators.values())
        return cls(blocks, max(blocks), int(cache.num_sectors) + RESERVED_SECTORS)

    def of_blocks(self, group: int, blocks: Sequence[int]) -> list[int]:
        """Return the ledger rows of a KV group's blocks, given transformers' block ids."""
        count = self.blocks_per_sector[group]
        if count == self.per_sector:
            return list(blocks)
        return [block // count * self.per_sector + block % count for block in blocks]

    def unused(self, group: int, sectors: Sequence[int]) -> list[int]:
        """Return the ledger rows in a KV group's sectors that correspond to no block."""
        offsets = range(self.blocks_per_sector[group], self.per_sector)
        return [sector * self.per_sector + offset for sector in sectors for offset in offsets]


def hello_of(manager: Any, processor: Any, epoch: int) -> Hello:
    """Return the `Hello` message of a ContinuousBatchingManager and its batch processor."""
    cache, config = processor.cache, manager.continuous_batching_config
    rows = LedgerRows.of(cache)
    allocators = list(cache.cache_allocators.values())
    return Hello(
        epoch=epoch,
        time_ns=time.monotonic_ns(),
        wall_time_ns=time.time_ns(),
        model=_model(manager.model),
        cache=CacheInfo(
            num_blocks=rows.num_sectors * rows.per_sector,
            block_size=min(int(allocators[0].tokens_per_page), MAX_BLOCK_SIZE),
            block_bytes=int(cache.bytes_per_sector) // rows.per_sector,
            dtype=dtype_name(cache.dtype),
            prefix_caching=bool(cache.use_prefix_sharing),
            max_num_seqs=int(config.max_requests_per_batch or 0),
            max_num_batched_tokens=int(cache.max_batch_tokens),
            has_parents=True,
            groups=tuple(map(_group, allocators)),
            num_reserved_blocks=RESERVED_SECTORS * rows.per_sector,
        ),
        device=_device(cache.device),
        engine_version=f"transformers {import_module('transformers').__version__}",
        pid=os.getpid(),
        host=host_id(),
        capabilities=Capabilities(
            engine="transformers", completions=False, allocator_map=False, groups=len(allocators) > 1
        ),
        num_ranks=int(getattr(manager.distributed_helper, "tp_size", 1) or 1),
    )


def memory_of(model: Any, processor: Any, epoch: int) -> MemoryBreakdown:
    """Return the current memory use of the process by purpose, in bytes."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    tensor = processor.cache.cache_tensor
    stats = import_module("torch").cuda.memory_stats(tensor.device) if tensor.device.type == "cuda" else {}
    return MemoryBreakdown(
        epoch=epoch,
        time_ns=time.monotonic_ns(),
        weights_bytes=sum(tensors.values()),
        kv_bytes=int(tensor.nbytes),
        allocated_bytes=int(stats.get("allocated_bytes.all.current", -1)),
        reserved_bytes=int(stats.get("reserved_bytes.all.current", -1)),
        peak_bytes=int(stats.get("allocated_bytes.all.peak", -1)),
    )


def _group(allocator: Any) -> KVGroup:
    return KVGroup(
        kind=_KINDS.get(allocator.layer_type, str(allocator.layer_type)),
        num_layers=len(allocator.layer_indices),
        block_size=min(int(allocator.tokens_per_page), MAX_BLOCK_SIZE),
        block_bytes=int(allocator.bytes_per_block),
        window=int(getattr(allocator, "sliding_window", None) or 0),
    )


def _model(model: Any) -> ModelInfo:
    text = model.config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    architecture = type(model).__name__
    return model_info(
        model.config,
        text,
        name=_name(str(getattr(model.config, "_name_or_path", "") or ""), architecture),
        architecture=architecture,
        dtype=dtype_name(model.dtype),
        head_dim=int(getattr(text, "head_dim", 0) or (text.hidden_size // heads if heads else 0)),
        num_parameters=sum(each.numel() for each in model.parameters()),
        max_model_len=int(getattr(text, "max_position_embeddings", 0) or 0),
    )


def _name(name: str, architecture: str) -> str:
    """Return the model's name. If `name` is an absolute path, only the name of the folder is returned; if
    `name` is empty, `architecture` is returned.
    """
    return Path(name).name if Path(name).is_absolute() else name or architecture


def _device(device: Any) -> DeviceInfo:
    torch = import_module("torch")
    kind = str(torch.device(device).type)
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceInfo(kind=kind, name=str(properties.name), total_bytes=int(properties.total_memory))
    return replace(device_info(kind), num_threads=int(torch.get_num_threads()))
