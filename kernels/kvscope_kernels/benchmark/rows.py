"""The rows of the benchmark: which operation is measured on which workload. Knows the operations; is given
the timer.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from kvscope_kernels.benchmark.calls import (
    ExpertsWorkload,
    copies_of,
    decode_call,
    expert_calls,
    layer_calls,
    pools_of,
    prefill_call,
    weight_products,
    write_call,
)
from kvscope_kernels.benchmark.stream_read import stream_read, stream_read_torch, sums_for
from kvscope_kernels.benchmark.timing import Call, Timer
from kvscope_kernels.benchmark.workload import AttentionWorkload, Pool, make_pool
from kvscope_kernels.dispatch import Ops, torch_ops

_LAYERS: Final = 32

DECODE: Final = (
    AttentionWorkload(name="8 x 32k", seq_lens=(32768,) * 8),
    AttentionWorkload(name="64 x 4k", seq_lens=(4096,) * 64),
    AttentionWorkload(name="32 x 4k", seq_lens=(4096,) * 32),
    AttentionWorkload(name="8 x 4k", seq_lens=(4096,) * 8),
    AttentionWorkload(name="1 x 32k", seq_lens=(32768,)),
    AttentionWorkload(name="64 x 2k, 9/3/64", seq_lens=(2048,) * 64, num_heads=9, num_kv_heads=3, head_dim=64),
)
QUANTIZED: Final = tuple(
    replace(work, name=f"{work.name}, {name}", kv_dtype=dtype)
    for dtype, name in ((torch.int8, "int8"), (torch.float8_e4m3fn, "fp8"))
    for work in (DECODE[0], DECODE[3], DECODE[5])
)
SKEWED: Final = AttentionWorkload(name="1 x 32k + 31 x 1k", seq_lens=(32768,) + (1024,) * 31)
WRITE: Final = (
    AttentionWorkload(name="32 tokens", seq_lens=(512,) * 32),
    AttentionWorkload(name="8k tokens", seq_lens=(2048,) * 8, query_lens=(1024,) * 8),
    AttentionWorkload(name="8k tokens, int8", seq_lens=(2048,) * 8, query_lens=(1024,) * 8, kv_dtype=torch.int8),
    AttentionWorkload(
        name="8k tokens, fp8", seq_lens=(2048,) * 8, query_lens=(1024,) * 8, kv_dtype=torch.float8_e4m3fn
    ),
)
PREFILL: Final = (
    AttentionWorkload(name="1 x 4k", seq_lens=(4096,), query_lens=(4096,)),
    AttentionWorkload(name="8 x 2k", seq_lens=(2048,) * 8, query_lens=(2048,) * 8),
    AttentionWorkload(name="8 x 1k", seq_lens=(1024,) * 8, query_lens=(1024,) * 8),
    AttentionWorkload(
        name="16 x 1k, 9/3/64",
        seq_lens=(1024,) * 16,
        query_lens=(1024,) * 16,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
    ),
    AttentionWorkload(
        name="4 x 1k, 8/4/256",
        seq_lens=(1024,) * 4,
        query_lens=(1024,) * 4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
    ),
    AttentionWorkload(name="512 after 16k", seq_lens=(16384,), query_lens=(512,)),
    AttentionWorkload(name="512 after 16k, int8", seq_lens=(16384,), query_lens=(512,), kv_dtype=torch.int8),
    AttentionWorkload(name="512 after 16k, fp8", seq_lens=(16384,), query_lens=(512,), kv_dtype=torch.float8_e4m3fn),
)
TURNS: Final = (
    AttentionWorkload(name="16 after 32k", seq_lens=(32768,), query_lens=(16,)),
    AttentionWorkload(name="64 after 32k", seq_lens=(32768,), query_lens=(64,)),
    AttentionWorkload(name="128 after 32k", seq_lens=(32768,), query_lens=(128,)),
    AttentionWorkload(name="16 after 32k, int8", seq_lens=(32768,), query_lens=(16,), kv_dtype=torch.int8),
    AttentionWorkload(name="8 x 5 after 8k", seq_lens=(8192,) * 8, query_lens=(5,) * 8),
    AttentionWorkload(name="16 after 32k + 7 after 1k", seq_lens=(32768,) + (1024,) * 7, query_lens=(16,) * 8),
)
"""Short turns, and drafts to be verified, behind long contexts."""
EXPERTS: Final = tuple(ExpertsWorkload(num_tokens) for num_tokens in (1, 4, 16, 64, 256, 8192))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    time_us: float
    rate: float
    unit: str
    ratio: float | None = None
    """Time of `against` over this one's: above 1 is faster than that."""
    against: str = ""


def decode_rows(ops: Ops, device: str, timer: Timer, works: Sequence[AttentionWorkload] = DECODE) -> Iterator[Row]:
    """Bytes a second of decode over those of reading the same bytes, and what scattering the blocks costs."""
    for work in works:
        pools = pools_of(work, device)
        in_a_row = [make_pool(work, device, is_permuted=False, storage=pool.storage) for pool in pools]
        times = timer(
            {
                "scattered": [decode_call(ops, pool) for pool in pools],
                "in a row": [decode_call(ops, pool) for pool in in_a_row],
                "read": [_read(pool, device) for pool in pools],
            }
        )
        terabytes = work.kv_bytes / 1e12
        yield _row(f"decode {work.name}", times, "scattered", terabytes, "TB/s", "read")
        yield _row(f"decode {work.name}, in a row", times, "in a row", terabytes, "TB/s", "scattered")


def skew_rows(ops: Ops, device: str, timer: Timer, work: AttentionWorkload = SKEWED) -> Iterator[Row]:
    """One long request among short ones, against as many bytes in equal requests."""
    length = sum(work.seq_lens) // len(work.seq_lens)
    even = replace(work, name="equal lengths", seq_lens=(length,) * len(work.seq_lens))
    times = timer({each.name: [decode_call(ops, pool) for pool in pools_of(each, device)] for each in (work, even)})
    yield _row(f"decode {work.name}", times, work.name, work.kv_bytes / 1e12, "TB/s", even.name)


def quantized_rows(
    ops: Ops, device: str, timer: Timer, works: Sequence[AttentionWorkload] = QUANTIZED
) -> Iterator[Row]:
    """Decode over a cache of 8 bits, against the same requests over one that is not quantized."""
    for work in works:
        plain = replace(work, name="not quantized", kv_dtype=None)
        times = timer(
            {each.name: [decode_call(ops, pool) for pool in pools_of(each, device)] for each in (work, plain)}
        )
        yield _row(f"decode {work.name}", times, work.name, work.kv_bytes / 1e12, "TB/s", plain.name)


def write_rows(ops: Ops, device: str, timer: Timer, works: Sequence[AttentionWorkload] = WRITE) -> Iterator[Row]:
    """Bytes a second, read and written, of writing keys and values."""
    for work in works:
        times = timer({"write": [write_call(ops, pool) for pool in pools_of(work, device)]})
        read = replace(work, kv_dtype=None)
        moved = work.num_queries * (read.kv_bytes + work.kv_bytes) // sum(work.seq_lens)
        yield _row(f"kv_write {work.name}", times, "write", moved / 1e12, "TB/s", None)


def layer_rows(ops: Ops, device: str, timer: Timer, counts: Sequence[int] = (1, 64, 8192)) -> Iterator[Row]:
    """What stands between the products of a layer of 4,096, against the same in torch's operations."""
    for count in counts:
        calls = layer_calls(ops, device, count)
        plain = layer_calls(torch_ops(), device, count)
        for name, (call, moved) in calls.items():
            repeats = max(1, min(_LAYERS, 4096 // count))  # as in a step, where one such kernel follows another
            times = timer({"ours": [call] * repeats, "torch": [plain[name][0]] * repeats})
            yield _row(f"{name} {count:,} tokens", times, "ours", moved / 1e12, "TB/s", "torch")


def prefill_rows(ops: Ops, device: str, timer: Timer, works: Sequence[AttentionWorkload] = PREFILL) -> Iterator[Row]:
    """Arithmetic a second of prefill, beside torch's own attention on dense keys where that does the same."""
    for work in works:
        pools = pools_of(work, device)
        contenders: dict[str, list[Call]] = {"ours": [prefill_call(ops, pool) for pool in pools]}
        if work.query_lens == work.seq_lens:
            contenders["torch, dense"] = [_dense(work, device) for _ in pools]
        times = timer(contenders)
        against = "torch, dense" if len(times) > 1 else None
        yield _row(f"prefill {work.name}", times, "ours", work.flops / 1e12, "TFLOP/s", against)


def turn_rows(ops: Ops, device: str, timer: Timer, works: Sequence[AttentionWorkload] = TURNS) -> Iterator[Row]:
    """Bytes a second of prefill in short runs over those of reading all keys and values once."""
    for work in works:
        pools = pools_of(work, device)
        reads = [_read(pool, device) for pool in pools]
        times = timer({"ours": [prefill_call(ops, pool) for pool in pools], "read": reads})
        yield _row(f"prefill {work.name}", times, "ours", work.kv_bytes / 1e12, "TB/s", "read")


def expert_rows(ops: Ops, device: str, timer: Timer, works: Sequence[ExpertsWorkload] = EXPERTS) -> Iterator[Row]:
    """Bytes a second of a mixture of experts over those of reading the weights of its active experts once."""
    for work in works:
        call, read, num_bytes = expert_calls(ops, device, work)
        times = timer({"ours": [call], "read": [read]})
        name = f"experts {work.top_k} of {work.num_experts}, {work.num_tokens:,} tokens"
        yield _row(name, times, "ours", num_bytes / 1e12, "TB/s", "read")


def product_rows(
    device: str, timer: Timer, counts: Sequence[int] = (1, 4, 16, 64, 2048), shape: tuple[int, int] = (4096, 14336)
) -> Iterator[Row]:
    """Bytes of weights a second in products of 4 bits, 8 bits and FP8, against the same in bf16 by torch."""
    formats = weight_products(shape, device)
    plain = torch.randn(shape, device=device, dtype=torch.bfloat16)
    for name, made in formats.items():
        num_bytes = sum(tensor.nbytes for tensor in made.tensors)
        copies = [made, *(deepcopy(made) for _ in range(1, copies_of(num_bytes, device)))]
        others = [plain, *(plain.clone() for _ in range(1, copies_of(plain.nbytes, device)))]
        for count in counts:
            x = torch.randn(count, shape[1], device=device, dtype=torch.bfloat16)
            contenders: dict[str, list[Call]] = {
                name: [partial(each.product, x) for each in copies],
                "bf16": [partial(linear, x, each) for each in others],
            }
            times = timer(contenders)
            yield _row(f"product {name} {count:,} rows", times, name, num_bytes / 1e12, "TB/s", "bf16")


def _row(name: str, times: dict[str, float], ours: str, amount: float, unit: str, against: str | None) -> Row:
    ratio = times[against] / times[ours] if against else None
    return Row(
        name=name,
        time_us=times[ours] * 1e6,
        rate=amount / times[ours],
        unit=unit,
        ratio=ratio,
        against=against or "",
    )


def _read(pool: Pool, device: str) -> Call:
    op = stream_read_torch if device == "cpu" else stream_read
    return partial(op, pool.words, sums_for(pool.words))


def _dense(work: AttentionWorkload, device: str) -> Call:
    shape = (len(work.seq_lens), work.num_heads, work.seq_lens[0], work.head_dim)
    query = torch.randn(shape, device=device, dtype=work.dtype)
    key, value = (torch.randn_like(query[:, : work.num_kv_heads]) for _ in range(2))
    return partial(scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True)
