"""Virtual memory with the real driver: pages, a graph that outlives mapping changes, and freed memory."""

from __future__ import annotations

import pytest
import torch

from kvscope_engine.model.kv_cache.virtual_memory.paged_memory import page_bytes, reserve
from kvscope_engine.policy.allocation.address_space import address_space

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("cuda.bindings.driver")
    return torch.device("cuda")


def test_captured_graph_works_while_pages_are_mapped_and_unmapped(device: torch.device) -> None:
    size = page_bytes(device)
    assert size >= 64 << 10
    assert size & (size - 1) == 0
    block = size // 4
    space = address_space(
        block_bytes=(block, block), page_bytes=size, num_blocks=16, block_size=16, max_model_len=160, max_num_seqs=4
    )
    free_before = torch.cuda.mem_get_info(device)[0]
    memory = reserve((block, block), space, size, device)
    assert free_before - torch.cuda.mem_get_info(device)[0] >= memory.num_bytes == 8 * size
    layers = [memory.tensor(index, (space.num_rows, block // 4), torch.float32) for index in range(2)]
    first, second = 0, space.slot_blocks
    memory.map(first, 4)
    source = torch.arange(block, dtype=torch.float32, device=device).view(4, -1)
    layers[0][first : first + 4] = source
    layers[1][first : first + 4] = -source
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    total = torch.zeros((), device=device)
    with torch.cuda.graph(graph):
        total.copy_(layers[0][first : first + 4].sum() - layers[1][first : first + 4].sum())
    graph.replay()
    assert total.item() == pytest.approx(2 * source.sum().item(), rel=1e-5)
    memory.unmap(first, 4)
    memory.map(second, 8)
    layers[0][second : second + 8] = 1.0
    assert memory.resident_bytes() == 4 * size
    memory.unmap(second, 8)
    memory.map(first, 4)
    for layer in layers:
        layer[first : first + 4] = 0.5
    graph.replay()
    assert total.item() == 0.0
    free_before = torch.cuda.mem_get_info(device)[0]
    memory.close()
    assert torch.cuda.mem_get_info(device)[0] - free_before >= 8 * size


def test_virtual_engine_gives_the_tokens_of_the_paged_one(device: torch.device, tiny_model: object) -> None:
    from kvscope_engine import Engine, EngineConfig, SamplingParams
    from kvscope_telemetry.messages.commands import Submit

    assert callable(tiny_model)
    name = tiny_model()
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [Submit(request_id="-", prompt_token_ids=(3 + n, *range(5, 20 + n)), sampling=sampling) for n in range(6)]

    def said(allocator: str) -> list[list[int]]:
        config = EngineConfig(
            model=name,
            device="cuda",
            dtype="float32",
            max_num_seqs=4,
            kv_memory_bytes=16 << 20,
            enable_prefix_caching=False,
            allocator=allocator,
        )
        with Engine(config) as engine:
            return [completion.token_ids for completion in engine.generate(prompts)]

    assert said("virtual") == said("paged")
