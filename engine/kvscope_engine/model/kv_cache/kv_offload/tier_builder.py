"""Building the lower tiers from the configuration: how many places, which copies, which file."""

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
"""Of each of the two staging buffers on a GPU; beyond this the link is as fast as it gets."""
QUEUE_SHARE: Final = 4
"""One part in so many of the host tier's size again, at most, is taken by records on their way to disk ..."""
MIN_QUEUE_BYTES: Final = 16 * MIB
"""... and no less than this may be: a drive is quick with many records at once."""
PRACTICE_BYTES: Final = 4 * MIB
"""Copied there and back at the start, to know what a swap costs: a few milliseconds."""


def make_tier_mover(
    config: EngineConfig,
    storage: KVStorage,
    fingerprint: str,
    *,
    state_bytes: int = 0,
    others: OtherMovers | None = None,
) -> BlockMover | None:
    """What moves blocks of `storage`; None without a host tier. `fingerprint` tells models and dtypes apart;
    `state_bytes` of the host tier are taken by states of recurrent layers; `others` move theirs alike.

    Raises BadInput when a tier is larger than there is room, too small for a block, or its file cannot be had.
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
    """Where no layer has keys and values: blocks are places in the prefix cache alone, and so are those below."""
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
    """Copy some blocks there and back unchanged, twice: what the first time costs more, it costs once."""
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
