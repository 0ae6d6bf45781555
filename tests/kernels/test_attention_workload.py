"""Workloads of attention benchmarks count bytes and operations once, and their tables name each block once."""

from dataclasses import replace

import torch

from kvscope_kernels.attention_workload import AttentionWorkload, make_pool

SMALL = AttentionWorkload(name="small", seq_lens=(40, 17), num_heads=6, num_kv_heads=2, head_dim=64)
QUANTIZED = [replace(SMALL, name=str(dtype), kv_dtype=dtype) for dtype in (torch.int8, torch.float8_e4m3fn)]


def test_attention_benchmark_workload_counts_each_byte_and_operation_once() -> None:
    assert SMALL.kv_bytes == 57 * 2 * 64 * 2 * 2
    assert QUANTIZED[0].kv_bytes == 57 * 2 * 2 * (64 + 4)
    assert AttentionWorkload(name="", seq_lens=(3,), query_lens=(3,), num_heads=1, head_dim=1).flops == 4 * (1 + 2 + 3)
    assert AttentionWorkload(name="", seq_lens=(10,), query_lens=(2,), num_heads=1, head_dim=1).flops == 4 * (9 + 10)


def test_attention_benchmark_block_tables_contain_each_block_once() -> None:
    for is_permuted in (True, False):
        pool = make_pool(SMALL, "cpu", is_permuted=is_permuted)
        assert sorted([*pool.block_tables[0, :3].tolist(), *pool.block_tables[1, :2].tolist()]) == [0, 1, 2, 3, 4]


def test_attention_benchmark_returns_the_cache_slots_of_the_last_tokens() -> None:
    work = AttentionWorkload(name="", seq_lens=(18, 3), query_lens=(4, 1), num_heads=2, num_kv_heads=1, head_dim=16)
    pool = make_pool(work, "cpu", is_permuted=False)
    assert pool.last_slots().tolist() == [14, 15, 16, 17, 2 * 16 + 2]
