"""The tiers on a GPU: bytes, pinning, and copies concurrent with a forward pass. `tests/gpu.sh` runs this.

`KVSCOPE_GPU_REHEARSAL=1` runs the same tests on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvscope_engine.model.kv_cache.kv_offload.block_mover import BlockMover
from kvscope_engine.model.kv_cache.kv_offload.tier_builder import make_tier_mover
from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape
from kvscope_telemetry.engine_config import EngineConfig

pytestmark = pytest.mark.gpu
REHEARSAL = bool(os.environ.get("KVSCOPE_GPU_REHEARSAL"))
NUM_BLOCKS, NUM_PLACES = 400, 300


@pytest.fixture
def gpu_storage() -> KVStorage:
    if not (REHEARSAL or torch.cuda.is_available()):
        pytest.skip("needs a CUDA device")
    layers = [LayerShape(8, 128)] * 16
    storage = KVStorage(NUM_BLOCKS, 16, layers, torch.bfloat16, torch.device("cpu" if REHEARSAL else "cuda"))
    for tensor in storage.block_tensors:
        tensor.normal_()
    return storage


@pytest.fixture
def gpu_mover(gpu_storage: KVStorage, own_cache: Path) -> Iterator[BlockMover]:
    config = EngineConfig(
        host_kv_memory_bytes=NUM_PLACES * gpu_storage.block_bytes, disk_kv_memory_bytes=64 * gpu_storage.block_bytes
    )
    mover = make_tier_mover(config, gpu_storage, "")
    assert mover is not None
    yield mover
    mover.close()


def test_host_memory_slab_of_the_gpu_tier_has_exactly_the_requested_bytes_and_is_pinned(
    gpu_mover: BlockMover, gpu_storage: KVStorage
) -> None:
    stats = gpu_mover.stats
    assert stats.host_is_pinned or REHEARSAL, gpu_mover.note
    assert stats.host_real_bytes == stats.host_requested_bytes == NUM_PLACES * gpu_storage.block_bytes
    assert stats.torch_pinned_bytes > stats.host_requested_bytes


def test_blocks_saved_from_the_gpu_are_intact_although_they_are_overwritten_at_once(
    gpu_mover: BlockMover, gpu_storage: KVStorage
) -> None:
    before = [tensor.clone() for tensor in gpu_storage.block_tensors]
    blocks = torch.randperm(NUM_BLOCKS).tolist()[:NUM_PLACES]
    slots = torch.randperm(NUM_PLACES).tolist()
    for _ in range(5):
        for low in range(0, NUM_PLACES, 10):
            gpu_mover.save(blocks[low : low + 10], slots[low : low + 10])
        gpu_mover.flush()
        for tensor in gpu_storage.block_tensors:
            tensor.fill_(float("nan"))
        gpu_mover.load(slots, blocks)
        gpu_mover.flush()
        for tensor, whole in zip(gpu_storage.block_tensors, before, strict=True):
            assert torch.equal(tensor[blocks], whole[blocks])
            tensor.copy_(whole)


def test_blocks_come_back_from_disk(gpu_mover: BlockMover, gpu_storage: KVStorage) -> None:
    before = [tensor.clone() for tensor in gpu_storage.block_tensors]
    numbers = list(range(60))
    gpu_mover.save(numbers, numbers)
    assert all(gpu_mover.offload(numbers, numbers[::-1], [None] * 60))
    gpu_mover.save([n + 100 for n in numbers], numbers)
    gpu_mover.flush()
    for tensor in gpu_storage.block_tensors:
        tensor.zero_()
    assert all(gpu_mover.load_from_disk(numbers[::-1], numbers))
    gpu_mover.load(numbers, numbers)
    gpu_mover.flush()
    for tensor, whole in zip(gpu_storage.block_tensors, before, strict=True):
        assert torch.equal(tensor[:60], whole[:60])


def test_measured_swap_speed_is_plausible(gpu_mover: BlockMover, gpu_storage: KVStorage) -> None:
    """Seconds per byte there and back: between 1 TB/s and 10 MB/s on a busy machine. A wrong number of blocks or
    layers would be outside that range.
    """
    seconds = gpu_mover.swap_seconds(1000) / (2 * 1000 * gpu_storage.block_bytes)
    assert 1e-12 < seconds < 1e-7
