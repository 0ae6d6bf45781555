"""Tests that need a GPU: graph capture without host reads, and caches above 2^31 elements."""

from typing import Any

import pytest
import torch

from kvscope_kernels import Ops, ops_for
from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.grouped_product import grouped_product
from kvscope_kernels.paged_decode_attention import paged_decode_attention
from kvscope_kernels.quantized_linear.grouped_weight import rounded

pytestmark = pytest.mark.gpu


@pytest.fixture
def ops() -> Ops:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return ops_for("cuda")


def test_captured_decode_is_replayed_with_other_lengths(
    ops: Ops, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    lengths = [[1, 1, 1, 1], [700, 16, 0, 129], [64, 2000, 17, 1]]
    batches = [build(shape(seq_lens=each, dtype=torch.bfloat16), "cuda", seed=len(each)) for each in lengths]
    largest = max(batches, key=lambda batch: batch.block_tables.shape[1])
    static = {name: getattr(largest, name).clone() for name in ("query", "block_tables", "seq_lens")}
    k_cache, v_cache = (torch.empty_like(cache) for cache in (largest.k_cache, largest.v_cache))
    out = largest.poisoned_out()

    def step() -> None:
        arguments = static["query"], k_cache, v_cache, static["block_tables"], static["seq_lens"]
        ops.decode(AttentionArgs(*arguments, largest.scale, max_seq_len=2000, out=out))

    for cache in (k_cache, v_cache):
        cache.zero_()
    static["block_tables"].zero_()
    static["seq_lens"].fill_(1)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in batches:
        static["query"].copy_(batch.query)
        static["seq_lens"].copy_(batch.seq_lens)
        static["block_tables"][:, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        for cache, content in ((k_cache, batch.k_cache), (v_cache, batch.v_cache)):
            cache[: len(content)].copy_(content)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, reference(batch))


@pytest.mark.usefixtures("ops")
def test_layers_of_a_captured_decode_step_share_one_plan_at_current_lengths(
    shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    """The plan for two layers is made in the graph, so each replay uses the current lengths."""
    batches = [build(shape(seq_lens=each, dtype=torch.bfloat16), "cuda") for each in ([700, 16, 0], [3, 1900, 40])]
    longest = batches[1]
    query, seq_lens = longest.query.clone(), longest.seq_lens.clone()
    tables = torch.zeros_like(longest.block_tables)
    caches = [torch.zeros_like(cache) for cache in (longest.k_cache, longest.v_cache)]
    outs = [longest.poisoned_out(), longest.poisoned_out()]

    def step() -> int:
        plans = DecodePlans()
        for out in outs:
            args = AttentionArgs(query, *caches, tables, seq_lens, longest.scale, max_seq_len=1900, out=out)
            paged_decode_attention(args, plans)
        return len(plans.plans)

    assert step() == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in batches:
        columns = min(tables.shape[1], batch.block_tables.shape[1])
        tables[:, :columns].copy_(batch.block_tables[:, :columns])
        query.copy_(batch.query)
        seq_lens.copy_(batch.seq_lens)
        for cache, content in zip(caches, (batch.k_cache, batch.v_cache), strict=True):
            cache[: len(content)].copy_(content)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            assert_close(out, reference(batch))


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_captured_grouped_product_is_replayed_with_other_rows(dtype: torch.dtype) -> None:
    """The weights have 4 bits."""
    weight = torch.randn(4096, 2048, generator=torch.Generator().manual_seed(0))
    rounded_weight = rounded(weight, 4, 128)
    product = grouped_product(rounded_weight, None, torch.device("cuda"))
    x = torch.zeros(5, 2048, dtype=dtype, device="cuda")
    product.product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product.product(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        expected = x.double().cpu() @ rounded_weight.widened().to(dtype).double().T
        assert (found.double().cpu() - expected).norm() <= 1e-2 * expected.norm()


def test_blocks_above_two_to_the_31_elements_are_correct(ops: Ops) -> None:
    """The cache has 4.5 GB and more than 2^31 elements, so offsets must be 64-bit."""
    num_blocks, block_size, num_kv_heads, head_dim = 72_000, 16, 16, 64
    storage = torch.empty(num_blocks, 2, num_kv_heads, block_size, head_dim, dtype=torch.float16, device="cuda")
    assert storage.numel() > 2**31
    k_cache, v_cache = (storage[:, i].transpose(1, 2) for i in range(2))
    last = num_blocks - 1
    new = torch.randn(4, num_kv_heads, head_dim, dtype=torch.float16, device="cuda")
    slots = torch.arange(4, device="cuda") + last * block_size
    ops.kv_write(new, -new, k_cache, v_cache, slots)
    assert torch.equal(k_cache[last, :4], new)
    assert torch.equal(v_cache[last, :4], -new)
    storage[last - 1] = storage[last]
    tables = torch.tensor([[last], [last - 1]], dtype=torch.int32, device="cuda")
    query = torch.randn(2, num_kv_heads, head_dim, dtype=torch.float16, device="cuda")
    query[1] = query[0]
    lengths = torch.full((2,), 4, dtype=torch.int32, device="cuda")
    out = ops.decode(AttentionArgs(query, k_cache, v_cache, tables, lengths, 0.125))
    scores = torch.einsum("hd,thd->ht", query[0].double(), new.double()) * 0.125
    expected = torch.einsum("ht,thd->hd", scores.softmax(1), -new.double())
    torch.testing.assert_close(out.double(), expected.expand(2, -1, -1), rtol=0, atol=4e-3)


@pytest.mark.parametrize("form", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_captured_step_quantizes_and_reads_back(ops: Ops, form: torch.dtype) -> None:
    """Write and decode run in one graph, replayed with other tokens in other slots."""
    storage = torch.zeros(9, 2, 2, 16, 64, dtype=torch.uint8, device="cuda").view(form)
    scales = torch.zeros(9, 2, 2, 16, device="cuda")
    caches = [storage[:, i].transpose(1, 2) for i in range(2)]
    parts = {"k_scale": scales[:, 0].transpose(1, 2), "v_scale": scales[:, 1].transpose(1, 2)}
    new = torch.randn(3, 2, 64, dtype=torch.bfloat16, device="cuda")
    query = torch.randn(3, 6, 64, dtype=torch.bfloat16, device="cuda")
    slots = torch.full((3,), -1, dtype=torch.int64, device="cuda")
    tables = torch.tensor([[1], [5], [8]], dtype=torch.int32, device="cuda")
    lengths = torch.ones(3, dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        ops.kv_write(new, new, *caches, slots, **parts)
        return ops.decode(AttentionArgs(query, *caches, tables, lengths, 0.125, max_seq_len=16, **parts))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        new.normal_()
        slots.copy_(tables[:, 0] * 16)
        graph.replay()
        expected = new.double().repeat_interleave(3, dim=1)  # with one token each, attention returns its value
        error = (out.double() - expected).square().mean().sqrt()
        assert error <= 0.04 * expected.square().mean().sqrt()
