"""Operations and cases that `bench kernels` measures on a CPU and on a GPU. Does no timing."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch.nn.functional import linear

from kvscope_engine.bench.kernels.calls import (
    ExpertsWorkload,
    copies_of,
    decode_call,
    expert_layer,
    layer_calls,
    pools_of,
    prefill_call,
    quantized_linears,
    write_call,
)
from kvscope_engine.bench.kernels.contest import OURS, REFERENCE, CallCycle, Contest, first_line
from kvscope_engine.bench.kernels.peers import PEERS
from kvscope_kernels.attention_workload import AttentionWorkload, Pool, make_pool
from kvscope_kernels.copy_rows import row_tensors
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.dispatch import Ops, torch_ops
from kvscope_kernels.graph_timing import Call

_CPU_CYCLE_BYTES: Final = 128 << 20
_SMALL: Final = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
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
SHORT_RUNS: Final = (
    AttentionWorkload(name="16 after 32k", seq_lens=(32768,), query_lens=(16,)),
    AttentionWorkload(name="64 after 32k", seq_lens=(32768,), query_lens=(64,)),
    AttentionWorkload(name="128 after 32k", seq_lens=(32768,), query_lens=(128,)),
    AttentionWorkload(name="16 after 32k, int8", seq_lens=(32768,), query_lens=(16,), kv_dtype=torch.int8),
    AttentionWorkload(name="8 x 5 after 8k", seq_lens=(8192,) * 8, query_lens=(5,) * 8),
    AttentionWorkload(name="16 after 32k + 7 after 1k", seq_lens=(32768,) + (1024,) * 7, query_lens=(16,) * 8),
)
"""Workloads with a few new tokens after long contexts: chat turns, and speculative tokens to verify."""
EXPERTS: Final = tuple(ExpertsWorkload(num_tokens) for num_tokens in (1, 4, 16, 64, 256, 8192))
CPU_EXPERTS: Final = (ExpertsWorkload(1, 16, 4, 768, 256), ExpertsWorkload(16, 16, 4, 768, 256))
CPU_DECODE: Final = (
    AttentionWorkload(name="8 x 1k", seq_lens=(1024,) * 8),
    AttentionWorkload(name="1 x 4k", seq_lens=(4096,)),
    AttentionWorkload(name="8 x 2k, 9/3/64", seq_lens=(2048,) * 8, num_heads=9, num_kv_heads=3, head_dim=64),
    AttentionWorkload(name="1 x 4k + 7 x 512", seq_lens=(4096,) + (512,) * 7),
)
CPU_PREFILL: Final = (
    AttentionWorkload(name="1 x 512", seq_lens=(512,), query_lens=(512,)),
    AttentionWorkload(
        name="4 x 256, 9/3/64", seq_lens=(256,) * 4, query_lens=(256,) * 4, num_heads=9, num_kv_heads=3, head_dim=64
    ),
    AttentionWorkload(name="64 after 2k", seq_lens=(2048,), query_lens=(64,)),
)
CPU_WRITE: Final = (
    AttentionWorkload(name="8 tokens", seq_lens=(512,) * 8),
    AttentionWorkload(name="512 tokens, int8", seq_lens=(512,), query_lens=(512,), kv_dtype=torch.int8),
)
NOT_QUANTIZED: Final = "torch, not quantized"
ContestFactory = Callable[[Ops, str, torch.dtype], Iterator[Contest]]


def decode(
    ops: Ops, device: str, dtype: torch.dtype, works: Sequence[AttentionWorkload] | None = None
) -> Iterator[Contest]:
    """Yield contests of decode attention, with one new token per request."""
    workloads = works or (CPU_DECODE if device == "cpu" else (*DECODE, *QUANTIZED, SKEWED))
    for work in (replace(each, dtype=dtype) for each in workloads):
        num_bytes = work.kv_bytes + 2 * len(work.seq_lens) * work.num_heads * work.head_dim * dtype.itemsize
        contest = _attention("paged decode", work, device, partial(decode_call, ops), decode_call, num_bytes)
        yield _without_duplicate_reference(contest, ops, "decode")


def prefill(
    ops: Ops, device: str, dtype: torch.dtype, works: Sequence[AttentionWorkload] | None = None
) -> Iterator[Contest]:
    """Yield contests of prefill attention: whole prompts, chunks of prompts, and short chat turns."""
    workloads = works or (CPU_PREFILL if device == "cpu" else (*PREFILL, *SHORT_RUNS))
    for work in (replace(each, dtype=dtype) for each in workloads):
        num_bytes = work.kv_bytes + 2 * work.num_queries * work.num_heads * work.head_dim * dtype.itemsize
        call = partial(prefill_call, ops)
        contest = _attention("paged prefill", work, device, call, prefill_call, num_bytes, work.flops)
        yield _without_duplicate_reference(contest, ops, "prefill")


def write(
    ops: Ops, device: str, dtype: torch.dtype, works: Sequence[AttentionWorkload] | None = None
) -> Iterator[Contest]:
    """Yield contests of writing keys and values to their blocks, quantized if the cache has 8 bits."""
    for work in (replace(each, dtype=dtype) for each in works or (CPU_WRITE if device == "cpu" else WRITE)):
        pools = _pools(work, device)
        plain = replace(work, kv_dtype=None)
        num_bytes = work.num_queries * (plain.kv_bytes + work.kv_bytes) // sum(work.seq_lens)
        contenders = {
            OURS: CallCycle([write_call(ops, pool) for pool in pools]),
            REFERENCE: CallCycle([write_call(torch_ops(), pool) for pool in pools], in_graph=False),
        }
        contest = Contest(kernel="kv write", case=work.name, num_bytes=num_bytes, contenders=contenders)
        yield _without_duplicate_reference(contest, ops, "kv_write")


def layer(ops: Ops, device: str, dtype: torch.dtype, counts: Sequence[int] | None = None) -> Iterator[Contest]:
    """Yield contests of the operations between the matmuls of a layer with 4,096 hidden elements.

    These are normalization, rotary embedding with KV write, and gated activation.
    """
    for count in counts or ((1, 16) if device == "cpu" else (1, 64, 8192)):
        ours, plain = (layer_calls(each, device, count, dtype) for each in (ops, torch_ops()))
        for name, (call, num_bytes) in ours.items():
            repeats = _repeats(device, count)
            contenders = {
                OURS: CallCycle([_without_result(call)] * repeats),
                REFERENCE: CallCycle([_without_result(plain[name][0])] * repeats),
            }
            case = f"{count:,} token{'s' * (count > 1)}"
            contest = Contest(kernel=name.replace("_", " "), case=case, num_bytes=num_bytes, contenders=contenders)
            yield _without_duplicate_reference(contest, ops, name)


def experts(
    ops: Ops, device: str, dtype: torch.dtype, works: Sequence[ExpertsWorkload] | None = None
) -> Iterator[Contest]:
    """Yield contests of a mixture-of-experts layer. The reported bytes are the weights of the active experts."""
    for work in works or (CPU_EXPERTS if device == "cpu" else EXPERTS):
        arguments, num_bytes = expert_layer(device, work)
        contenders = {
            OURS: CallCycle([partial(ops.mix_experts, *arguments)]),
            REFERENCE: CallCycle([partial(torch_ops().mix_experts, *arguments)], in_graph=False),
        }
        case = f"{work.top_k} of {work.num_experts}, {work.num_tokens:,} token{'s' * (work.num_tokens > 1)}"
        contest = Contest(kernel="experts", case=case, num_bytes=num_bytes, contenders=contenders)
        yield _without_duplicate_reference(contest, ops, "mix_experts")


def quantized_matmuls(
    ops: Ops,
    device: str,
    dtype: torch.dtype,
    counts: Sequence[int] | None = None,
    shape: tuple[int, int] | None = None,
) -> Iterator[Contest]:
    """Yield contests of linear layers with int4, int8 and fp8 weights, compared with torch's unquantized matmuls."""
    outputs, inputs = shape or ((1536, 576) if device == "cpu" else (4096, 14336))
    plain = torch.randn(outputs, inputs, device=device).to(dtype)
    plain_copies = [plain, *(plain.clone() for _ in range(1, copies_of(plain.nbytes, device)))]
    for name, quantized in quantized_linears((outputs, inputs), device).items():
        if name == "fp8" and device == "cpu":
            continue  # fp8 products are not supported on a CPU
        num_bytes = sum(tensor.nbytes for tensor in quantized.tensors)
        copies = [quantized, *(deepcopy(quantized) for _ in range(1, copies_of(num_bytes, device)))]
        for count in counts or ((1, 32) if device == "cpu" else (1, 4, 16, 64, 2048)):
            x = torch.randn(count, inputs, device=device).to(dtype)
            contenders = {
                OURS: CallCycle([_without_result(partial(each.product, x)) for each in copies]),
                NOT_QUANTIZED: CallCycle([_without_result(partial(linear, x, each)) for each in plain_copies]),
            }
            case = f"{name}, {count:,} row{'s' * (count > 1)}"
            yield Contest(kernel="product", case=case, num_bytes=num_bytes, contenders=contenders)


def copies(ops: Ops, device: str, dtype: torch.dtype, num_blocks: int | None = None) -> Iterator[Contest]:
    """Yield a contest of block copies within the pool, for 32 layers in one call."""
    count = num_blocks or (8 if device == "cpu" else 256)
    storage = [torch.randn(2 * count, 2, 8, 16, 128, device=device).to(dtype) for _ in range(32)]
    rows = row_tensors(storage)
    pairs = torch.stack([torch.arange(count), torch.arange(count, 2 * count)], 1).to(device)
    num_bytes = 2 * len(storage) * count * storage[0][:1].nbytes
    contenders = {
        OURS: CallCycle([partial(ops.copy_rows, rows, pairs)]),
        REFERENCE: CallCycle([partial(torch_ops().copy_rows, rows, pairs)], in_graph=False),
    }
    contest = Contest(kernel="copy rows", case=f"{count} blocks", num_bytes=num_bytes, contenders=contenders)
    yield _without_duplicate_reference(contest, ops, "copy_rows")


def token_masks(ops: Ops, device: str, dtype: torch.dtype, vocabulary: int = 128256) -> Iterator[Contest]:
    """Yield a contest of applying token masks of structured output, for 8 requests."""
    logits = torch.randn(8, vocabulary, device=device)
    allowed = torch.randint(-(2**31), 2**31 - 1, (8, -(-vocabulary // 32)), device=device).to(torch.int32)
    rows = torch.arange(8, device=device)
    arguments = logits, rows, allowed
    contenders = {
        OURS: CallCycle([partial(ops.allow_tokens, *arguments)] * _repeats(device, len(logits))),
        REFERENCE: CallCycle([partial(torch_ops().allow_tokens, *arguments)], in_graph=False),
    }
    num_bytes = logits.nbytes // 2 + allowed.nbytes  # half of the logits are masked: written without being read
    contest = Contest(kernel="allow tokens", case="8 requests", num_bytes=num_bytes, contenders=contenders)
    yield _without_duplicate_reference(contest, ops, "allow_tokens")


def top_p_sampling(ops: Ops, device: str, dtype: torch.dtype, vocabulary: int = 128256) -> Iterator[Contest]:
    """Yield contests of top-p sampling of one token per request, from flat and from peaked logits."""
    for count, spread in ((1, 4.0), (64, 4.0), (64, 1.0)):
        logits = spread * torch.randn(count, vocabulary, device=device)
        options = torch.tensor([[1.0, 0.0, 0.9, 0.0]] * count, dtype=torch.float64, device=device)
        keys = torch.randint(-(2**62), 2**62, (count,), device=device)
        arguments = logits, options, keys, torch.arange(count, device=device)
        contenders = {
            OURS: CallCycle([partial(ops.draw_tokens, *arguments)]),
            REFERENCE: CallCycle([partial(torch_ops().draw_tokens, *arguments)], in_graph=False),
        }
        case = f"{count} requests, top-p, logits within {3 * spread:g}"
        contest = Contest(kernel="draw tokens", case=case, num_bytes=logits.nbytes, contenders=contenders)
        yield _without_duplicate_reference(contest, ops, "draw_tokens")


def heat(
    ops: Ops, device: str, dtype: torch.dtype, works: Sequence[AttentionWorkload] | None = None
) -> Iterator[Contest]:
    """Yield contests of decode attention that also returns the share of attention on each block (page heat)."""
    for work in (replace(each, dtype=dtype) for each in works or (CPU_DECODE[2:3] if device == "cpu" else DECODE[3:4])):
        pools = _pools(work, device)
        contenders = {
            OURS: CallCycle([_shares_call(ops, pool) for pool in pools]),
            REFERENCE: CallCycle([_shares_call(torch_ops(), pool) for pool in pools], in_graph=False),
        }
        contest = Contest(kernel="decode with heat", case=work.name, num_bytes=work.kv_bytes, contenders=contenders)
        yield _without_duplicate_reference(contest, ops, "decode")


KERNELS: Final[dict[str, ContestFactory]] = {
    "decode": decode,
    "prefill": prefill,
    "write": write,
    "layer": layer,
    "experts": experts,
    "products": quantized_matmuls,
    "copy": copies,
    "forms": token_masks,
    "draws": top_p_sampling,
    "heat": heat,
}


def _attention(
    kernel: str,
    work: AttentionWorkload,
    device: str,
    make_our_call: Callable[[Pool], Call],
    make_call: Callable[[Ops, Pool], Call],
    num_bytes: int,
    flops: int = 0,
) -> Contest:
    pools = _pools(work, device)
    contest = Contest(
        kernel=kernel,
        case=work.name,
        num_bytes=num_bytes,
        flops=flops,
        contenders={
            OURS: CallCycle([make_our_call(pool) for pool in pools]),
            REFERENCE: CallCycle([make_call(torch_ops(), pool) for pool in pools[:2]], in_graph=False),
        },
    )
    for name, peer in PEERS.items():
        try:
            contest.contenders[name] = CallCycle([peer(work, pool) for pool in pools])
        except Exception as error:  # third-party libraries raise any exception; it is the reason for absence
            contest.absent[name] = first_line(error)
    return contest


def _without_duplicate_reference(contest: Contest, ops: Ops, field: str) -> Contest:
    """Remove the torch reference from the contest if it is also kvscope's implementation on this device."""
    if getattr(ops, field) is getattr(torch_ops(), field):
        del contest.contenders[REFERENCE]
        contest.absent[REFERENCE] = "is ours on this device"
    return contest


def _pools(work: AttentionWorkload, device: str) -> list[Pool]:
    """Return the block pools of a contest. On a CPU, small workloads get up to 16 pools, so that together they exceed
    its caches.
    """
    if device != "cpu":
        return pools_of(work, device)
    count = max(1, min(16, _CPU_CYCLE_BYTES // max(1, work.kv_bytes)))
    return [make_pool(work, device) for _ in range(count)]


def _shares_call(ops: Ops, pool: Pool) -> Call:
    shares = torch.zeros(len(pool.seq_lens), pool.block_tables.shape[1], device=pool.query.device)
    return _without_result(partial(ops.decode, pool.attention_args(), DecodePlans(), shares))


def _repeats(device: str, count: int) -> int:
    """Return how many times a CUDA graph repeats a call for `count` tokens.

    Small calls are repeated, because otherwise mainly the launch of the graph would be measured.
    """
    return 1 if device == "cpu" else max(1, min(32, 4096 // count))


def _without_result(call: Call) -> Call:
    """Return a function that runs `call` and returns None, so that results are not compared."""

    def run() -> None:
        call()

    return run
