"""The report of a memory shortage names the holders, the likeliest cause, and the option that prevents it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from kvscope_engine.model.device_memory.shortage_report import Shortage, shortage_report, start_remedy
from kvscope_engine.model.device_memory.torch_allocator import AllocatorUse, allocator_use
from kvscope_engine.model.layers.weight_bytes import part_of, weights_by_part
from kvscope_telemetry.messages.telemetry import MemoryBreakdown

GIB = 1 << 30


def shortage(*, split: int = 0, others: int = 2, num_tokens: int = 8192, num_requests: int = 4) -> Shortage:
    """Return a shortage of an 80 GiB GPU with 72 GiB held by torch; other programs had 2 GiB at the start."""
    memory = MemoryBreakdown(
        epoch=1,
        time_ns=1,
        weights_bytes=16 * GIB,
        kv_bytes=50 * GIB,
        allocated_bytes=70 * GIB - split * GIB,
        reserved_bytes=70 * GIB,
        split_bytes=split * GIB,
    )
    return Shortage(
        memory=memory,
        total=80 * GIB,
        free=(10 - others) * GIB,
        others_planned=2 * GIB,
        num_tokens=num_tokens,
        num_requests=num_requests,
        utilization=0.9,
    )


@pytest.mark.parametrize(
    ("found", "option"),
    [
        (shortage(), "--max-num-batched-tokens 4096"),
        (shortage(num_tokens=64, num_requests=64), "--max-num-seqs 32"),
        (shortage(split=6), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        (shortage(others=8), "--gpu-memory-utilization 0.8"),
    ],
)
def test_memory_shortage_report_names_the_option_that_prevents_its_cause(found: Shortage, option: str) -> None:
    said = shortage_report(found)
    assert option in said
    assert "weights 16.0 GiB, KV cache 50.0 GiB" in said
    assert "\n" not in said


def test_memory_taken_by_other_programs_is_reported() -> None:
    assert "other programs took 6.0 GiB since the start: end them" in shortage_report(shortage(others=8))
    named = replace(shortage(others=8), grown_holders="game 5.9 GiB (pid 7)")
    assert "took 6.0 GiB since the start (game 5.9 GiB (pid 7)): end them" in shortage_report(named)
    assert "other programs and contexts 8.0 GiB, free 2.0 GiB" in shortage_report(shortage(others=8))


def test_shortage_on_a_cpu_names_pool_and_step_options() -> None:
    memory = MemoryBreakdown(epoch=1, time_ns=1, weights_bytes=GIB, kv_bytes=GIB)
    said = shortage_report(Shortage(memory=memory, free=GIB // 2, num_tokens=512, num_requests=2))
    assert "--kv-memory" in said
    assert "--max-num-batched-tokens 256" in said


def test_shortage_at_the_start_has_a_remedy() -> None:
    assert "other programs on the GPU" in start_remedy(on_gpu=True)
    assert "--dtype bfloat16" in start_remedy(on_gpu=False)


def test_allocator_statistics_are_read_by_name() -> None:
    stats = {
        "allocated_bytes.all.current": 5,
        "reserved_bytes.all.current": 9,
        "inactive_split_bytes.all.current": 2,
        "allocated_bytes.all.peak": 7,
    }
    assert allocator_use(torch.device("cuda"), lambda device: stats) == AllocatorUse(5, 9, 2, 7)
    assert allocator_use(torch.device("cuda"), lambda device: {}) == AllocatorUse()
    assert allocator_use(torch.device("cpu")) == AllocatorUse()


def test_weights_by_part_add_up_and_count_tied_weights_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(10, 4)
            self.self_attn = nn.Linear(4, 4, bias=False)
            self.mlp = nn.Linear(4, 8, bias=False)
            self.lm_head = nn.Linear(4, 10, bias=False)
            self.lm_head.weight = self.embed_tokens.weight

    parts = {part.name: part.num_bytes for part in weights_by_part(Model())}
    assert parts == {"Embeddings": 160, "MLP": 128, "Attention": 64}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.0.self_attn.kvscope_fused.qkv", "Attention"),
        ("model.layers.0.post_attention_layernorm", "Norms"),
        ("model.layers.3.mlp.experts.7", "Experts"),
        ("lm_head", "Head"),
        ("model.rotary", "Others"),
    ],
)
def test_weight_category_of_a_module_is_derived_from_its_name(name: str, part: str) -> None:
    assert part_of(name) == part
