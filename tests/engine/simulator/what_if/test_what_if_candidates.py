"""`virtual` is compared with the pages that the engine would map."""

from __future__ import annotations

import pytest

from kvscope_engine.policy.allocation.address_space import address_space
from kvscope_engine.simulator.what_if.candidates import VIRTUAL, candidates
from kvscope_telemetry.messages.what_if import HOST_PAGE_BYTES, PAGE_BYTES, Memory

LAYERS = 30


@pytest.mark.parametrize("page_bytes", [HOST_PAGE_BYTES, PAGE_BYTES])
@pytest.mark.parametrize("layer_bytes", [12 << 10, 6528, 1 << 20, 3 << 20])
def test_candidate_has_the_page_groups_of_the_engine(page_bytes, layer_bytes):
    memory = Memory(
        num_blocks=5000, block_size=16, block_bytes=LAYERS * layer_bytes, num_layers=LAYERS, page_bytes=page_bytes
    )
    space = address_space(
        block_bytes=[layer_bytes] * LAYERS,
        page_bytes=page_bytes,
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        max_model_len=2048,
        max_num_seqs=16,
    )
    virtual = next(candidate for candidate in candidates(memory) if candidate.allocator == VIRTUAL)
    assert virtual.block_size == int(space.group_blocks * 16)
    assert virtual.num_blocks == space.num_groups


def test_unknown_page_size_leaves_out_virtual():
    memory = Memory(num_blocks=5000, block_size=16, block_bytes=3000, num_layers=30, page_bytes=0)
    assert VIRTUAL not in {candidate.allocator for candidate in candidates(memory)}
