"""Builds one call of each operation, on a block pool or on random tensors, for benchmarks. Does no timing."""

from functools import partial
from typing import Any, Final, NamedTuple

import torch

from kvscope_kernels.attention_args import QueryRuns
from kvscope_kernels.attention_workload import AttentionWorkload, Pool, make_pool
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.dispatch import Ops
from kvscope_kernels.fused_moe.expert_weights import ExpertWeights, Gate
from kvscope_kernels.gated_activation import SILU
from kvscope_kernels.graph_timing import Call
from kvscope_kernels.grouped_product import GroupedProduct, grouped_product
from kvscope_kernels.kv_write import kv_write_torch
from kvscope_kernels.quantized_linear.fp8 import fp8_product, rounded_fp8
from kvscope_kernels.quantized_linear.grouped_weight import GroupedWeight
from kvscope_kernels.rotate_write import CosSin, Rotation, rotate_torch

_CYCLE_BYTES: Final = 512 << 20  # several times any L2


def pools_of(work: AttentionWorkload, device: str) -> list[Pool]:
    """Return block pools with the same workload: one on a CPU, at least two on a GPU.

    On a GPU there are enough pools that reading all of them evicts the first from L2.
    """
    count = 1 if device == "cpu" else max(2, -(-_CYCLE_BYTES // work.kv_bytes))
    return [make_pool(work, device) for _ in range(count)]


def copies_of(num_bytes: int, device: str) -> int:
    """Return how many copies of a weight of `num_bytes` bytes a benchmark needs: one on a CPU, at least two on a GPU.

    On a GPU there are enough copies that reading all of them evicts the first from L2.
    """
    return 1 if device == "cpu" else max(2, -(-_CYCLE_BYTES // num_bytes))


def quantized_linears(shape: tuple[int, int], device: str) -> dict[str, GroupedProduct]:
    """Return quantized linear layers with random weights of `shape` (outputs, inputs), by weight type: int4, int8 and
    fp8.
    """
    outputs, inputs = shape
    products: dict[str, GroupedProduct] = {}
    for bits, group in ((4, 32), (8, 64)):
        codes = torch.randint(2**bits, shape, dtype=torch.uint8)
        scale = torch.full((outputs, -(-inputs // group)), 0.01, dtype=torch.float16)
        weight = GroupedWeight(codes, scale, -(2.0 ** (bits - 1)) * scale, bits, group)
        products[f"int{bits}"] = grouped_product(weight, None, torch.device(device))
    products["fp8"] = fp8_product(rounded_fp8(torch.randn(shape) / 64), None, torch.device(device))
    return products


def decode_call(ops: Ops, pool: Pool) -> Call:
    """Return a call of decode attention, which writes and returns `pool.out`."""
    plans = DecodePlans()  # filled by the first call, as by the first layer of a step
    return partial(ops.decode, pool.attention_args(pool.out), plans)


def prefill_call(ops: Ops, pool: Pool) -> Call:
    """Return a call of prefill attention, which writes and returns `pool.out`."""
    plans = DecodePlans()  # as in decode, if runs are split
    runs = QueryRuns(pool.query_start, pool.max_query_len, plans=plans)
    return partial(ops.prefill, pool.attention_args(pool.out), runs)


def write_call(ops: Ops, pool: Pool) -> Call:
    """Return a call that writes random keys and values to the last slots of the pool."""
    key, value = (torch.randn_like(pool.query[:, : pool.storage.shape[2]]) for _ in range(2))
    caches = pool.k_cache, pool.v_cache, pool.last_slots(), pool.k_scale, pool.v_scale
    return partial(ops.kv_write, key, value, *caches)


def layer_calls(ops: Ops, device: str, count: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, tuple[Call, int]]:
    """Return calls of a layer's operations other than matmuls and attention, for `count` tokens, by name.

    Each is paired with the number of bytes that it must read and write.
    """
    x, delta = torch.randn(count, 4096, device=device), torch.randn(count, 4096, device=device, dtype=dtype)
    weight, eps = torch.ones(4096, device=device), torch.tensor(1e-5, device=device)
    gate_up = torch.randn(count, 2 * 14336, device=device, dtype=dtype)
    heads = torch.randn(count, 48, 128, device=device, dtype=dtype)
    cos_sin = CosSin(*torch.randn(2, count, 1, 128, device=device, dtype=dtype))
    rotation = Rotation(32, None, cos_sin)
    storage = torch.empty(-(-count // 16), 2, 8, 16, 128, device=device, dtype=dtype)
    caches = storage[:, 0].transpose(1, 2), storage[:, 1].transpose(1, 2), torch.arange(count, device=device)
    if (
        ops.kv_write is kv_write_torch and device != "cpu"
    ):  # it checks for padding on the host, which a CUDA graph cannot capture
        rotate = partial(_rotate_scatter, heads, rotation, *caches)
    else:
        rotate = partial(ops.rotate_write, heads, rotation, *caches)
    return {
        "add_rms_norm": (
            partial(ops.add_rms_norm, x, delta, weight, eps, dtype),
            count * 4096 * 2 * (4 + dtype.itemsize),
        ),
        "rotate_write": (rotate, 2 * heads.nbytes + 2 * cos_sin.cos.nbytes),
        "gated_activation": (partial(ops.gated_activation, gate_up, SILU), gate_up.nbytes * 3 // 2),
    }


class ExpertsWorkload(NamedTuple):
    """Shape of a mixture-of-experts layer, and the number of tokens that it computes. The defaults are those of
    Qwen3-30B-A3B.
    """

    num_tokens: int
    num_experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    size: int = 768


def expert_layer(device: str, work: ExpertsWorkload) -> tuple[tuple[Any, ...], int]:
    """Return the arguments of `mix_experts`, and the bytes of the weights of the active experts."""
    num_tokens, num_experts, top_k, hidden, size = work
    up, down = (torch.randn(num_experts, *shape, device=device) / 32 for shape in ((2 * size, hidden), (hidden, size)))
    up, down = up.bfloat16(), down.bfloat16()
    weights = ExpertWeights(up, down, None, None, Gate())
    shares, ids = torch.randn(num_tokens, num_experts, device=device).softmax(-1).topk(top_k)
    x = torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16)
    num_active = len(set(ids.flatten().tolist()))
    return (x, ids, shares, weights), num_active * (up[:1].nbytes + down[:1].nbytes)


def _rotate_scatter(
    heads: torch.Tensor, rotation: Rotation, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Torch implementation of `rotate_write` (rotary embedding and KV write), without support for padding."""
    query, key, value = rotate_torch(heads, rotation)
    indices = (slots // 16, slots % 16)
    k_cache.index_put_(indices, key)
    v_cache.index_put_(indices, value)
    return query
