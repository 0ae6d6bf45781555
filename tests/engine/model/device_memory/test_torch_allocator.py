"""torch's memory snapshot as an allocator map."""

from __future__ import annotations

import pytest
import torch

from kvscope_engine.model.device_memory.torch_allocator import allocator_map
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.mirror.allocator_map import AllocatorPool, State, unpack_map

MIB = 1 << 20
BASE = 0x7F00_0000_0000


def block(address: int, size: int, state: str) -> dict[str, object]:
    return {"address": address, "size": size, "requested_size": size - 8, "state": state, "frames": []}


SNAPSHOT = [
    {
        "device": 0,
        "address": BASE,
        "total_size": 2 * MIB,
        "allocated_size": 512,
        "active_size": 1536,
        "requested_size": 504,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            block(BASE, 512, "active_allocated"),
            block(BASE + 512, 1024, "active_pending_free"),
            block(BASE + 1536, 2 * MIB - 1536, "inactive"),
        ],
    },
    {
        "device": 0,
        "address": BASE + (1 << 32),
        "total_size": 20 * MIB,
        "stream": 93_824_992,
        "segment_type": "large",
        "segment_pool_id": (0, 1),
        "blocks": [block(BASE + (1 << 32), 20 * MIB, "inactive")],
    },
    {"device": 1, "address": 1, "total_size": 8, "stream": 0, "segment_type": "large", "blocks": [block(1, 8, "?")]},
]


def test_torch_memory_snapshot_is_converted_to_an_allocator_map() -> None:
    packed = allocator_map(torch.device("cuda", 0), 6, lambda: SNAPSHOT)
    private, small = unpack_map(packed)
    assert (packed.tag, packed.device, packed.num_segments, packed.num_blocks) == (6, "cuda:0", 2, 4)
    assert (private.pool, private.stream, private.num_bytes) == (AllocatorPool.PRIVATE, 93_824_992, 20 * MIB)
    assert (small.pool, small.address) == (AllocatorPool.SMALL, BASE)
    assert small.offsets.tolist() == [0, 512, 1536]
    assert small.states.tolist() == [State.ALLOCATED, State.PENDING, State.CACHED]
    assert (packed.allocated_bytes, packed.pending_bytes) == (512, 1024)
    assert (packed.split_bytes, packed.largest_cached_bytes) == (2 * MIB - 1536, 20 * MIB)


def test_gpu_unused_by_torch_has_an_empty_map() -> None:
    packed = allocator_map(torch.device("cuda", 5), 1, lambda: SNAPSHOT)
    assert (packed.num_segments, unpack_map(packed)) == (0, [])


def test_cpu_has_no_allocator_map() -> None:
    with pytest.raises(BadInput, match="only on a GPU"):
        allocator_map(torch.device("cpu"), 1)


@pytest.mark.gpu
def test_allocator_map_of_a_gpu_adds_up_to_the_memory_that_torch_reports() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    held = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    packed = allocator_map(held.device, 1)
    assert packed.total_bytes == torch.cuda.memory_reserved()
    assert packed.allocated_bytes == torch.cuda.memory_allocated() > 0
    assert packed.split_bytes == torch.cuda.memory_stats()["inactive_split_bytes.all.current"]
    assert sum(one.num_bytes for one in unpack_map(packed)) == packed.total_bytes
