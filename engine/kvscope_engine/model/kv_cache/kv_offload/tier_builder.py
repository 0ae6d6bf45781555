"""Builds the lower tiers from the configuration: number of slots, kind of copies, and file of the disk tier."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch

from kvscope_engine.model.device_memory.device_streams import CudaStreams
from kvscope_engine.model.device_memory.host_slab import CudaPinner, HostSlab
from kvscope_engine.model.kv_cache.kv_offload.block_copies import BlockCopier, HostBlockCopier
from kvscope_engine.model.kv_cache.kv_offload.block_layout import BlockLayout, layout_text
from kvscope_engine.model.kv_cache.kv_offload.block_mover import BlockMover, OtherMovers
from kvscope_engine.model.kv_cache.kv_offload.disk_index import IndexRequirements
from kvscope_engine.model.kv_cache.kv_offload.disk_open import open_disk_file
from kvscope_engine.model.kv_cache.kv_offload.disk_records import record_bytes
from kvscope_engine.model.kv_cache.kv_offload.disk_tier import QUEUE_BYTES, DiskTier
from kvscope_engine.model.kv_cache.kv_offload.persistent_prefixes import PersistentPrefixes
from kvscope_engine.model.kv_cache.kv_offload.staged_copies import StagedBlockCopier
from kvscope_engine.model.kv_cache.kv_storage import MIB, KVStorage
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, KvscopeError

STAGING_BYTES: Final = 32 * MIB
"""Bytes of each of the two staging buffers on a GPU. Larger buffers do not increase the transfer rate."""
QUEUE_SHARE: Final = 4
"""Divisor of the host tier's size: the disk tier's write queue takes at most 1/QUEUE_SHARE of that size, in addition to
it.
"""
MIN_QUEUE_BYTES: Final = 16 * MIB
"""Minimum bytes of the disk tier's write queue. Drives are only fast with many records at a time."""
MEASURED_BYTES: Final = 4 * MIB
"""Bytes copied to host memory and back at the start, to measure the cost of a swap. Takes a few milliseconds."""


def make_tier_mover(
    config: EngineConfig,
    storage: KVStorage,
    fingerprint: str,
    *,
    state_bytes: int = 0,
    others: OtherMovers | None = None,
) -> BlockMover | None:
    """Build the mover of blocks between `storage` and the lower tiers; None without a host tier.

    Args:
        config: Configuration with the sizes and the file of the tiers.
        storage: Block pool on the device.
        fingerprint: Hash that distinguishes models and dtypes in a persistent file.
        state_bytes: Bytes of the host tier that states of recurrent layers take.
        others: Forwards each move to the other ranks.

    Raises:
        BadInput: A tier exceeds the free memory, is too small for a block, or its file cannot be used.
    """
    if not config.host_kv_memory_bytes:
        return None
    has_disk = config.disk_kv_memory_bytes > 0
    if not storage.block_tensors:
        return _mover_without_bytes(storage, "no layer has keys and values: nothing goes to disk" * has_disk)
    layout = BlockLayout(storage)
    is_cuda = layout.device.type == "cuda"
    with ExitStack() as cleanup:
        num_slots = _num_slots("--kv-host-memory", config.host_kv_memory_bytes - state_bytes, layout.block_bytes)
        slab = HostSlab(num_slots, layout.block_bytes, CudaPinner() if is_cuda else None)
        cleanup.callback(slab.close)
        copier = _staged_copier(layout, slab) if is_cuda else HostBlockCopier(layout, slab.rows)
        cleanup.callback(copier.close)
        _measure_copies(copier, layout, num_slots)
        disk, retained = _disk_tier(config, layout.block_bytes, f"{fingerprint};{layout_text(storage)}")
        cleanup.pop_all()
    note = "; ".join(filter(None, (slab.note, retained.note if retained is not None else "")))
    return BlockMover(copier, slab, disk, retained.salt if retained is not None else None, note, others)


def _mover_without_bytes(storage: KVStorage, note: str) -> BlockMover:
    """Build a mover for models without KV layers. Their blocks and slots are only entries of the prefix cache, without
    bytes.
    """
    slab = HostSlab(storage.num_blocks, 0)
    return BlockMover(HostBlockCopier(None, slab.rows), slab, None, None, note)


def _staged_copier(layout: BlockLayout, slab: HostSlab) -> StagedBlockCopier:
    staging_blocks = max(1, min(STAGING_BYTES // layout.block_bytes, slab.rows.shape[0]))
    try:
        return StagedBlockCopier(layout, slab.rows, CudaStreams(layout.device), staging_blocks)
    except torch.OutOfMemoryError as error:
        size = 2 * staging_blocks * layout.block_bytes / MIB
        raise KvscopeError(
            f"no memory for {size:.0f} MiB of staging on {layout.device}, through which blocks go to host memory;"
            " give a smaller --kv-memory or --gpu-memory-utilization"
        ) from error


def _measure_copies(copier: BlockCopier, layout: BlockLayout, num_slots: int) -> None:
    """Copy some blocks to host memory and back, unchanged, to measure the copy speed."""
    count = max(1, min(MEASURED_BYTES // layout.block_bytes, layout.num_blocks, num_slots))
    ids = range(count)
    for _ in range(2):  # only the second time counts: the first has one-time costs
        copier.saving.reset()
        copier.loading.reset()
        copier.save(ids, ids)
        copier.load(ids, ids)
        copier.flush()
        copier.await_copies(ids)
        copier.measure()
    copier.saving.reset_totals()
    copier.loading.reset_totals()


def _disk_tier(
    config: EngineConfig, block_bytes: int, identity: str
) -> tuple[DiskTier | None, PersistentPrefixes | None]:
    if not config.disk_kv_memory_bytes:
        return None, None
    size = record_bytes(block_bytes)
    num_slots = _num_slots("--kv-disk", config.disk_kv_memory_bytes, size)
    path = Path(os.path.realpath(config.disk_kv_path)) if config.disk_kv_path is not None else None
    file = open_disk_file(path, num_slots * size, keep=config.keep_disk_kv)
    try:
        retained = None
        if path is not None and config.keep_disk_kv:
            fingerprint = hashlib.sha256(identity.encode()).hexdigest()
            retained = PersistentPrefixes(file, path, IndexRequirements(fingerprint, config.block_size, num_slots))
        queue_bytes = max(MIN_QUEUE_BYTES, min(QUEUE_BYTES, config.host_kv_memory_bytes // QUEUE_SHARE))
        return DiskTier(file, num_slots, block_bytes, retained, max_queue_bytes=queue_bytes), retained
    except BaseException:
        if file.path is not None and not file.previous_bytes:
            file.path.unlink(missing_ok=True)
        os.close(file.fd)
        raise


def _num_slots(option: str, num_bytes: int, slot_bytes: int) -> int:
    if num_bytes < slot_bytes:
        raise BadInput(f"{option} {num_bytes} is not accepted: one block takes {slot_bytes} bytes there")
    return num_bytes // slot_bytes
