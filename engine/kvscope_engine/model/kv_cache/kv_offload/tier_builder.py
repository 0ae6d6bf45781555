"""Builds the lower tiers from the configuration: number of slots, kind of copies, and file."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch

from kvscope_engine.model.device_memory.device_streams import CudaStreams
from kvscope_engine.model.device_memory.host_slab import CudaPinner, HostSlab
from kvscope_engine.model.kv_cache.kv_offload.block_copies import Copies, PlainCopies
from kvscope_engine.model.kv_cache.kv_offload.block_layout import BlockLayout, layout_text
from kvscope_engine.model.kv_cache.kv_offload.block_mover import BlockMover, OtherMovers
from kvscope_engine.model.kv_cache.kv_offload.disk_open import open_disk_file
from kvscope_engine.model.kv_cache.kv_offload.disk_records import record_bytes
from kvscope_engine.model.kv_cache.kv_offload.disk_tier import QUEUE_BYTES, DiskTier
from kvscope_engine.model.kv_cache.kv_offload.kept_file import KeptFile
from kvscope_engine.model.kv_cache.kv_offload.kept_index import Expected
from kvscope_engine.model.kv_cache.kv_offload.staged_copies import StagedCopies
from kvscope_engine.model.kv_cache.kv_storage import MIB, KVStorage
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, KvscopeError

STAGING_BYTES: Final = 32 * MIB
"""Bytes of each of the two staging buffers on a GPU. Larger ones do not make the link faster."""
QUEUE_SHARE: Final = 4
"""The queue of records waiting for the disk takes at most 1/QUEUE_SHARE of the host tier's size, in addition to it."""
MIN_QUEUE_BYTES: Final = 16 * MIB
"""Lower limit for that queue in bytes, because a drive is fast only with many records at once."""
PRACTICE_BYTES: Final = 4 * MIB
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
        return _mover_of_nothing(storage, "no layer has keys and values: nothing goes to disk" * has_disk)
    words = BlockLayout(storage)
    is_cuda = words.device.type == "cuda"
    with ExitStack() as undo:
        num_places = _places("--kv-host-memory", config.host_kv_memory_bytes - state_bytes, words.block_bytes)
        slab = HostSlab(num_places, words.block_bytes, CudaPinner() if is_cuda else None)
        undo.callback(slab.close)
        copies = _staged(words, slab) if is_cuda else PlainCopies(words, slab.rows)
        undo.callback(copies.close)
        _practise(copies, words, num_places)
        disk, kept = _disk(config, words.block_bytes, f"{fingerprint};{layout_text(storage)}")
        undo.pop_all()
    note = "; ".join(filter(None, (slab.note, kept.note if kept is not None else "")))
    return BlockMover(copies, slab, disk, kept.salt if kept is not None else None, note, others)


def _mover_of_nothing(storage: KVStorage, note: str) -> BlockMover:
    """Build a mover for models without KV layers: blocks and slots are only entries of the prefix cache and have no
    bytes."""
    slab = HostSlab(storage.num_blocks, 0)
    return BlockMover(PlainCopies(None, slab.rows), slab, None, None, note)


def _staged(words: BlockLayout, slab: HostSlab) -> StagedCopies:
    staging_blocks = max(1, min(STAGING_BYTES // words.block_bytes, slab.rows.shape[0]))
    try:
        return StagedCopies(words, slab.rows, CudaStreams(words.device), staging_blocks)
    except torch.OutOfMemoryError as error:
        size = 2 * staging_blocks * words.block_bytes / MIB
        raise KvscopeError(
            f"no memory for {size:.0f} MiB of staging on {words.device}, through which blocks go to host memory;"
            " give a smaller --kv-memory or --gpu-memory-utilization"
        ) from error


def _practise(copies: Copies, words: BlockLayout, num_places: int) -> None:
    """Copy some blocks to host memory and back, unchanged, twice: only the second time counts, since the first has
    one-time costs."""
    count = max(1, min(PRACTICE_BYTES // words.block_bytes, words.num_blocks, num_places))
    ids = range(count)
    for _ in range(2):
        copies.saving.restart()
        copies.loading.restart()
        copies.save(ids, ids)
        copies.load(ids, ids)
        copies.flush()
        copies.settle(ids)
        copies.measure()
    copies.saving.forget_totals()
    copies.loading.forget_totals()


def _disk(config: EngineConfig, block_bytes: int, identity: str) -> tuple[DiskTier | None, KeptFile | None]:
    if not config.disk_kv_memory_bytes:
        return None, None
    size = record_bytes(block_bytes)
    num_places = _places("--kv-disk", config.disk_kv_memory_bytes, size)
    path = Path(os.path.realpath(config.disk_kv_path)) if config.disk_kv_path is not None else None
    file = open_disk_file(path, num_places * size, keep=config.keep_disk_kv)
    try:
        kept = None
        if path is not None and config.keep_disk_kv:
            fingerprint = hashlib.sha256(identity.encode()).hexdigest()
            kept = KeptFile(file, path, Expected(fingerprint, config.block_size, num_places))
        queue_bytes = max(MIN_QUEUE_BYTES, min(QUEUE_BYTES, config.host_kv_memory_bytes // QUEUE_SHARE))
        return DiskTier(file, num_places, block_bytes, kept, max_queue_bytes=queue_bytes), kept
    except BaseException:
        if file.path is not None and not file.found_bytes:
            file.path.unlink(missing_ok=True)
        os.close(file.fd)
        raise


def _places(option: str, num_bytes: int, place_bytes: int) -> int:
    if num_bytes < place_bytes:
        raise BadInput(f"{option} {num_bytes} is not accepted: one block takes {place_bytes} bytes there")
    return num_bytes // place_bytes
