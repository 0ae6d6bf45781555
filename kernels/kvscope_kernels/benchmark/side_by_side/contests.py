"""Which operations are measured in which cases, on a CPU and on a GPU. Knows no timer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from kvscope_kernels.benchmark.calls import decode_call, layer_calls, pools_of, prefill_call, write_call
from kvscope_kernels.benchmark.rows import DECODE, PREFILL, QUANTIZED, SKEWED, TURNS, WRITE
from kvscope_kernels.benchmark.side_by_side.contest import OURS, REFERENCE, Contender, Contest, first_line
from kvscope_kernels.benchmark.side_by_side.peers import PEERS
from kvscope_kernels.benchmark.timing import Call
from kvscope_kernels.benchmark.workload import AttentionWorkload, Pool, make_pool
from kvscope_kernels.copy_rows import row_tensors
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.dispatch import Ops, torch_ops

_CPU_CYCLE_BYTES: Final = 128 << 20
_SMALL: Final = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
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
Make = Callable[[Ops, str, torch.dtype], Iterator[Contest]]


def decode(
    ops: Ops, device: str, dtype: torch.dtype, works: Sequence[AttentionWorkload] | None = None
) -> Iterator[Contest]:
    """One new token for each request."""
    chosen = works or (CPU_DECODE if device == "cpu" else (*DECODE, *QUANTIZED, SKEWED))
    for work in (replace(each, dtype=dtype) for each in chosen):
        moved = work.kv_bytes + 2 * len(work.seq_lens) * work.num_heads * work.head_dim * dtype.itemsize
        contest = _attention("paged decode", work, device, partial(decode_call, ops), decode_call, moved)
        yield _without_twins(contest, ops, "decode")


def prefill(
    ops: Ops, device: str, dtype: torch.dtype, works: Sequence[AttentionWorkload] | None = None
) -> Iterator[Contest]:
    """Runs of new tokens: whole prompts, chunks of them, short turns."""
    chosen = works or (CPU_PREFILL if device == "cpu" else (*PREFILL, *TURNS))
    for work in (replace(each, dtype=dtype) for each in chosen):
        moved = work.kv_bytes + 2 * work.num_queries * work.num_heads * work.head_dim * dtype.itemsize
        call = partial(prefill_call, ops)
        contest = _attention("paged prefill", work, device, call, prefill_call, moved, work.flops)
        yield _without_twins(contest, ops, "prefill")


def write(
    ops: Ops, device: str, dtype: torch.dtype, works: Sequence[AttentionWorkload] | None = None
) -> Iterator[Contest]:
    """Keys and values into their blocks, rounded to 8 bits where the cache is of these."""
    for work in (replace(each, dtype=dtype) for each in works or (CPU_WRITE if device == "cpu" else WRITE)):
        pools = _pools(work, device)
        plain = replace(work, kv_dtype=None)
        moved = work.num_queries * (plain.kv_bytes + work.kv_bytes) // sum(work.seq_lens)
        contenders = {
            OURS: Contender([write_call(ops, pool) for pool in pools]),
            REFERENCE: Contender([write_call(torch_ops(), pool) for pool in pools], in_graph=False),
        }
        contest = Contest(kernel="kv write", case=work.name, num_bytes=moved, contenders=contenders)
        yield _without_twins(contest, ops, "kv_write")


def layer(ops: Ops, device: str, dtype: torch.dtype, counts: Sequence[int] | None = None) -> Iterator[Contest]:
    """What stands between the products of a layer of 4,096."""
    for count in counts or ((1, 16) if device == "cpu" else (1, 64, 8192)):
        ours, plain = (layer_calls(each, device, count, dtype) for each in (ops, torch_ops()))
        for name, (call, moved) in ours.items():
            repeats = _repeats(device, count)
            contenders = {
                OURS: Contender([_silent(call)] * repeats),
                REFERENCE: Contender([_silent(plain[name][0])] * repeats),
            }
            case = f"{count:,} token{'s' * (count > 1)}"
            contest = Contest(kernel=name.replace("_", " "), case=case, num_bytes=moved, contenders=contenders)
            yield _without_twins(contest, ops, name)


def copies(ops: Ops, device: str, dtype: torch.dtype, num_blocks: int | None = None) -> Iterator[Contest]:
    """Whole blocks inside the pool, 32 layers of them in one call."""
    count = num_blocks or (8 if device == "cpu" else 256)
    storage = [torch.randn(2 * count, 2, 8, 16, 128, device=device).to(dtype) for _ in range(32)]
    rows = row_tensors(storage)
    pairs = torch.stack([torch.arange(count), torch.arange(count, 2 * count)], 1).to(device)
    moved = 2 * len(storage) * count * storage[0][:1].nbytes
    contenders = {
        OURS: Contender([partial(ops.copy_rows, rows, pairs)]),
        REFERENCE: Contender([partial(torch_ops().copy_rows, rows, pairs)], in_graph=False),
    }
    contest = Contest(kernel="copy rows", case=f"{count} blocks", num_bytes=moved, contenders=contenders)
    yield _without_twins(contest, ops, "copy_rows")


def forms(ops: Ops, device: str, dtype: torch.dtype, vocabulary: int = 128256) -> Iterator[Contest]:
    """A mask of the tokens that may come, for each of 8 requests."""
    logits = torch.randn(8, vocabulary, device=device)
    allowed = torch.randint(-(2**31), 2**31 - 1, (8, -(-vocabulary // 32)), device=device).to(torch.int32)
    rows = torch.arange(8, device=device)
    arguments = logits, rows, allowed
    contenders = {
        OURS: Contender([partial(ops.allow_tokens, *arguments)] * _repeats(device, len(logits))),
        REFERENCE: Contender([partial(torch_ops().allow_tokens, *arguments)], in_graph=False),
    }
    moved = logits.nbytes // 2 + allowed.nbytes  # half of the logits are refused, and only written
    contest = Contest(kernel="allow tokens", case="8 requests", num_bytes=moved, contenders=contenders)
    yield _without_twins(contest, ops, "allow_tokens")


def draws(ops: Ops, device: str, dtype: torch.dtype, vocabulary: int = 128256) -> Iterator[Contest]:
    """A token by top-p for each request, of logits far and near."""
    for count, spread in ((1, 4.0), (64, 4.0), (64, 1.0)):
        logits = spread * torch.randn(count, vocabulary, device=device)
        options = torch.tensor([[1.0, 0.0, 0.9, 0.0]] * count, dtype=torch.float64, device=device)
        keys = torch.randint(-(2**62), 2**62, (count,), device=device)
        arguments = logits, options, keys, torch.arange(count, device=device)
        contenders = {
            OURS: Contender([partial(ops.draw_tokens, *arguments)]),
            REFERENCE: Contender([partial(torch_ops().draw_tokens, *arguments)], in_graph=False),
        }
        case = f"{count} requests, top-p, logits within {3 * spread:g}"
        contest = Contest(kernel="draw tokens", case=case, num_bytes=logits.nbytes, contenders=contenders)
        yield _without_twins(contest, ops, "draw_tokens")


def heat(
    ops: Ops, device: str, dtype: torch.dtype, works: Sequence[AttentionWorkload] | None = None
) -> Iterator[Contest]:
    """Decode that tells beside its result which share of attention fell on each block."""
    for work in (replace(each, dtype=dtype) for each in works or (CPU_DECODE[2:3] if device == "cpu" else DECODE[3:4])):
        pools = _pools(work, device)
        contenders = {
            OURS: Contender([_shares_call(ops, pool) for pool in pools]),
            REFERENCE: Contender([_shares_call(torch_ops(), pool) for pool in pools], in_graph=False),
        }
        contest = Contest(kernel="decode with heat", case=work.name, num_bytes=work.kv_bytes, contenders=contenders)
        yield _without_twins(contest, ops, "decode")


KERNELS: Final[dict[str, Make]] = {
    "decode": decode,
    "prefill": prefill,
    "write": write,
    "layer": layer,
    "copy": copies,
    "forms": forms,
    "draws": draws,
    "heat": heat,
}


def _attention(
    kernel: str,
    work: AttentionWorkload,
    device: str,
    ours: Callable[[Pool], Call],
    call: Callable[[Ops, Pool], Call],
    moved: int,
    flops: int = 0,
) -> Contest:
    pools = _pools(work, device)
    contest = Contest(
        kernel=kernel,
        case=work.name,
        num_bytes=moved,
        flops=flops,
        contenders={
            OURS: Contender([ours(pool) for pool in pools]),
            REFERENCE: Contender([call(torch_ops(), pool) for pool in pools[:2]], in_graph=False),
        },
    )
    for name, peer in PEERS.items():
        try:
            contest.contenders[name] = Contender([peer(work, pool) for pool in pools])
        except Exception as error:  # other people's libraries: whatever they raise is why they are absent
            contest.absent[name] = first_line(error)
    return contest


def _without_twins(contest: Contest, ops: Ops, field: str) -> Contest:
    """Where ours is the reference, it is not timed twice."""
    if getattr(ops, field) is getattr(torch_ops(), field):
        del contest.contenders[REFERENCE]
        contest.absent[REFERENCE] = "is ours on this device"
    return contest


def _pools(work: AttentionWorkload, device: str) -> list[Pool]:
    """On a CPU too more than its caches hold, but for what is small anyway."""
    if device != "cpu":
        return pools_of(work, device)
    count = max(1, min(16, _CPU_CYCLE_BYTES // max(1, work.kv_bytes)))
    return [make_pool(work, device) for _ in range(count)]


def _shares_call(ops: Ops, pool: Pool) -> Call:
    shares = torch.zeros(len(pool.seq_lens), pool.block_tables.shape[1], device=pool.query.device)
    return _silent(partial(ops.decode, pool.attention_args(), DecodePlans(), shares))


def _repeats(device: str, count: int) -> int:
    """In a graph, as in a step, one such kernel follows another: alone, the graph's own launch is what is timed."""
    return 1 if device == "cpu" else max(1, min(32, 4096 // count))


def _silent(call: Call) -> Call:
    """Some return pairs, and rows that were made anew: what is compared are attention's alone."""

    def run() -> None:
        call()

    return run
