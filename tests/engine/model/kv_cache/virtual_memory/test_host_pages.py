"""Host pages of the policy `virtual`: backed on first use, released, and measured by the system."""

from __future__ import annotations

import mmap
from fractions import Fraction

import pytest
import torch

from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape, tensor_block_bytes
from kvscope_engine.model.kv_cache.virtual_memory import host_pages
from kvscope_engine.model.kv_cache.virtual_memory.host_pages import HostPages
from kvscope_engine.model.kv_cache.virtual_memory.paged_memory import page_bytes, reserve
from kvscope_engine.policy.allocation.address_space import AddressSpace, address_space
from kvscope_telemetry.errors import KvscopeError

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE
LAYERS = (LayerShape(2, 16), LayerShape(1, 16))
"""Layers with 1,024 and 512 bytes per block of 4 slots in float32."""


def storage() -> tuple[KVStorage, HostPages, AddressSpace]:
    """Return a storage with slots of 64 blocks and pages of 4 and 8 blocks."""
    block_bytes = tensor_block_bytes(LAYERS, 4, torch.float32)
    sizes = {"num_blocks": 64, "block_size": 4, "max_model_len": 256, "max_num_seqs": 3}
    space = address_space(block_bytes=block_bytes, page_bytes=PAGE, **sizes)
    memory = reserve(block_bytes, space, page_bytes(CPU), CPU)
    assert isinstance(memory, HostPages)
    return KVStorage(space.num_rows, 4, LAYERS, torch.float32, CPU, memory=memory), memory, space


@pytest.mark.skipif(PAGE != 4096, reason="sizes are for pages of 4 KiB")
def test_memory_is_backed_on_first_use_and_released_by_unmap() -> None:
    """Uses a block of the second slot: one page in each layer, of 4 and 8 blocks."""
    kv, memory, space = storage()
    assert (space.slot_blocks, space.group_blocks, space.group_pages) == (64, Fraction(8), (2, 1))
    assert (kv.resident_bytes(), kv.num_bytes) == (0, 64 // 8 * 3 * PAGE)
    memory.map(64, 8)
    assert kv.resident_bytes() == 0
    for layer in range(2):
        kv.k(layer)[64] = 1.0
        kv.v(layer)[71] = 2.0
    assert kv.resident_bytes() == 3 * PAGE
    memory.map(72, 8)
    kv.k(0)[79] = 3.0
    assert kv.resident_bytes() == 4 * PAGE
    memory.unmap(72, 8)
    assert kv.resident_bytes() == 3 * PAGE
    assert kv.k(1)[64].eq(1.0).all()
    memory.unmap(64, 8)
    assert kv.resident_bytes() == 0
    assert kv.v(1)[71].eq(0.0).all()
    memory.close()


def test_closing_host_pages_releases_all_memory() -> None:
    kv, memory, _ = storage()
    values = kv.v(1)
    values[:9] = 1.0
    assert memory.resident_bytes() > 0
    kv.close()
    kv.close()
    assert memory.resident_bytes() == 0
    assert values[:9].eq(0.0).all(), "a remaining tensor reads zeros"


def test_resident_bytes_are_unknown_without_pages() -> None:
    kv = KVStorage(5, 4, LAYERS, torch.float32, CPU)
    assert (kv.resident_bytes(), kv.num_bytes) == (-1, 5 * 1536)


def test_address_space_refused_by_the_system_is_reported() -> None:
    space = AddressSpace(num_slots=4, slot_blocks=1 << 20, num_groups=1)
    with pytest.raises(KvscopeError) as refusal:
        HostPages((1 << 40,), space, PAGE)
    message = str(refusal.value)
    assert message.startswith("no address space for the KV cache: 4 slots of 1048576 blocks are 4398046511104 MiB (")
    assert message.endswith("; give a smaller --max-model-len or --max-num-seqs")
    assert "\n" not in message


def test_page_that_was_only_read_takes_no_memory() -> None:
    kv, memory, _ = storage()
    assert kv.k(0).sum().item() == 0.0
    assert memory.resident_bytes() == 0
    kv.close()


def test_resident_bytes_are_unknown_if_the_system_does_not_report_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, memory, _ = storage()
    monkeypatch.setattr(host_pages, "PAGE_MAP", "/proc/self/no such file")
    assert memory.resident_bytes() == -1
    kv.close()
