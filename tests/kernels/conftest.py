"""Fixtures of kernel tests: the torch references, the kernels in Triton's interpreter, and the kernels on a GPU.

A test that asks for `runner` runs three times; one that asks for `fast_runner` skips the interpreter, which takes
about 3 ms for each tile of a program. Batches are poisoned: every slot that no query may see is NaN, table entries
after a request's blocks are random, and outputs are NaN until written.
"""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from tests.conftest import STORMS, is_marked
from tests.kernels import interpreter_process
from torch import Tensor

from kvscope_kernels import Ops, ops_for
from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.copy_rows import copy_tensors
from kvscope_kernels.dispatch import torch_ops

GPU = pytest.param("gpu", marks=pytest.mark.gpu)
INTERPRETER = pytest.param("interpreter", marks=pytest.mark.interpreter)


@dataclass(frozen=True)
class Runner:
    """One implementation of the operations, and where its tensors live."""

    name: str
    ops: Ops
    device: str


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a batch; `query_lens` None means decode, with one query per request."""

    seq_lens: list[int]
    query_lens: list[int] | None = None
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    """Dtype of the cache; None means `dtype`."""
    layout: str = "HND"
    num_spare_columns: int = 1
    """Number of random entries in the block tables after the longest request's blocks."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """Arguments of an attention operation, and the dense keys and values for the reference."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    scale: float
    keys: list[Tensor]
    """(seq_len, num_kv_heads, head_dim) float64 of each request."""
    values: list[Tensor]
    options: dict[str, Any]
    """`k_scale` and `v_scale` are among them when the cache is quantized."""

    def args(self, **more: Any) -> AttentionArgs:
        arguments = (self.query, self.k_cache, self.v_cache, self.block_tables, self.seq_lens, self.scale)
        return AttentionArgs(*arguments, **self.options)._replace(**more)

    @property
    def runs(self) -> QueryRuns:
        return QueryRuns(self.query_start, int(self.query_start.diff().max()))

    def decode(self, ops: Ops, **more: Any) -> Tensor:
        return ops.decode(self.args(**{"out": self.poisoned_out()} | more))

    def prefill(self, ops: Ops, **more: Any) -> Tensor:
        return ops.prefill(self.args(**{"out": self.poisoned_out()} | more), self.runs)

    def poisoned_out(self) -> Tensor:
        return self.query.new_full((*self.query.shape[:2], self.v_cache.shape[3]), math.nan)


Interpret = Callable[..., Any]
"""`interpret(op, *arguments)` runs `op` in Triton's interpreter on CPU tensors."""


@pytest.fixture(scope="session")
def interpret() -> Iterator[Interpret]:
    """Function that runs an operation in Triton's interpreter, which needs its own process: `interpret(op,
    *arguments)`.

    Tensors are in shared memory, so that in-place results are visible here.
    """
    triton = pytest.importorskip("triton")
    if triton.__version__.startswith("3.6.") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        pytest.skip("Triton 3.6's interpreter cannot loop to a tensor with numpy 2.4")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, interpreter_process.start) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("OMP_NUM_THREADS", "1")
            pool.submit(os.getpid).result()  # the process has started with these variables

        def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = pool.submit(op, *args, **kwargs).result(timeout=240)
            outs = [kwargs.get("out"), *(each.out for each in args if isinstance(each, AttentionArgs))]
            return next((out for out in outs if out is not None), result)

        yield call


@pytest.fixture(params=["torch", "compiled", INTERPRETER, GPU])
def runner(request: pytest.FixtureRequest) -> Runner:
    return _runner(request)


@pytest.fixture(params=["torch", "compiled", GPU])
def fast_runner(request: pytest.FixtureRequest) -> Runner:
    return _runner(request)


def _runner(request: pytest.FixtureRequest) -> Runner:
    if request.param == "torch":
        return Runner("torch", torch_ops(), "cpu")
    if request.param == "compiled":
        return Runner("compiled", ops_for("cpu"), "cpu")
    if request.param == "interpreter":
        if not STORMS and is_marked(request.node, "interpreted_in_storms"):
            pytest.skip("others run the same lines: KVSCOPE_STORMS=1 interprets it too")
        interpret, kernels = request.getfixturevalue("interpret"), ops_for("cuda")
        ops = {each.name: partial(interpret, getattr(kernels, each.name)) for each in fields(Ops)}
        # Addresses belong to a process: an address to copy is looked up in its own process.
        ops["copy_rows"] = lambda rows, pairs: interpret(copy_tensors, rows.tensors, pairs)
        return Runner("interpreter", Ops(**ops), "cpu")
    if os.environ.get("KVSCOPE_GPU_REHEARSAL"):
        return Runner("rehearsal of gpu", ops_for("cpu"), "cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return Runner("gpu", ops_for("cuda"), "cuda")


@pytest.fixture
def shape() -> type[Shape]:
    return Shape


@pytest.fixture
def build() -> Callable[..., PagedBatch]:
    return build_batch


def build_batch(shape: Shape, device: str = "cpu", seed: int = 0) -> PagedBatch:
    """Return a batch of random content in randomly placed blocks, with NaN and random table entries everywhere else."""
    draw = torch.Generator().manual_seed(seed)
    query_lens = shape.query_lens if shape.query_lens is not None else [1] * len(shape.seq_lens)
    value_dim = shape.value_dim or shape.head_dim
    cuts = [-(-length // shape.block_size) for length in shape.seq_lens]
    num_blocks = sum(cuts) + 3
    k_cache, v_cache = _empty_caches(shape, num_blocks, value_dim)
    scales = _empty_scales(shape, num_blocks)
    free = torch.randperm(num_blocks, generator=draw).tolist()
    nonsense = torch.randint(-9, 1 << 30, (len(cuts), max(cuts, default=0) + shape.num_spare_columns), generator=draw)
    tables = nonsense.to(torch.int32)
    keys, values = [], []
    for request, (length, num_queries) in enumerate(zip(shape.seq_lens, query_lens, strict=True)):
        key, key_scale = _draw_rows(shape, length, shape.head_dim, draw)
        value, value_scale = _draw_rows(shape, length, value_dim, draw)
        first = int(first_seen(torch.tensor(length - num_queries), shape.options))
        for column in range(first // shape.block_size, cuts[request]):
            tables[request, column] = free.pop()
        positions = torch.arange(min(first, length), length)
        blocks, slots = tables[request, positions // shape.block_size].long(), positions % shape.block_size
        k_cache[blocks, slots], v_cache[blocks, slots] = key[first:], value[first:]
        scales[blocks, 0, slots], scales[blocks, 1, slots] = key_scale[first:], value_scale[first:]
        keys.append(key.double() * key_scale.double()[..., None])
        values.append(value.double() * value_scale.double()[..., None])
    query = torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, generator=draw).to(shape.dtype)
    options = dict(shape.options)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(shape.num_heads, generator=draw).to(shape.dtype).to(device)
    if shape.kv_dtype is not None:
        on_device = _on_device(scales, device)
        options |= {"k_scale": on_device[:, 0], "v_scale": on_device[:, 1]}
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return PagedBatch(
        query=query.to(device),
        k_cache=_on_device(k_cache, device),
        v_cache=_on_device(v_cache, device),
        block_tables=tables.to(device),
        seq_lens=torch.tensor(shape.seq_lens, dtype=torch.int32, device=device),
        query_start=starts.to(torch.int32).to(device),
        scale=1.0 / math.sqrt(shape.head_dim),
        keys=keys,
        values=values,
        options=options,
    )


def first_seen(position: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the first position that a query at each of these may see."""
    window = options.get("sliding_window")
    if window is None:
        return torch.zeros_like(position)
    first = position - position % window if options.get("is_chunked") else position - window + 1
    return first.clamp(min=0)


def _empty_caches(shape: Shape, num_blocks: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return views (num_blocks, block_size, num_kv_heads, dim) of storage that holds keys and values of a block
    together.
    """
    widest, dtype = max(shape.head_dim, value_dim), shape.kv_dtype or shape.dtype
    if shape.layout == "HND":
        storage = _poison((num_blocks, 2, shape.num_kv_heads, shape.block_size, widest), dtype).transpose(2, 3)
    else:
        storage = _poison((num_blocks, 2, shape.block_size, shape.num_kv_heads, widest), dtype)
    return storage[:, 0, ..., : shape.head_dim], storage[:, 1, ..., :value_dim]


def _empty_scales(shape: Shape, num_blocks: int) -> Tensor:
    """Return a view (num_blocks, 2, block_size, num_kv_heads) of NaN, with those of the keys first."""
    if shape.layout == "HND":
        return _poison((num_blocks, 2, shape.num_kv_heads, shape.block_size), torch.float32).transpose(2, 3)
    return _poison((num_blocks, 2, shape.block_size, shape.num_kv_heads), torch.float32)


def _draw_rows(shape: Shape, length: int, dim: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (length, num_kv_heads, dim) random numbers of the cache's dtype, and the scale of each vector."""
    rows = torch.randn(length, shape.num_kv_heads, dim, generator=draw)
    if shape.kv_dtype is None:
        return rows.to(shape.dtype), torch.ones(rows.shape[:2])
    scale = 0.02 + 0.02 * torch.rand(rows.shape[:2], generator=draw)
    return (rows * 40).clamp(-127, 127).to(shape.kv_dtype), scale


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return NaN; for 8-bit types the largest integer and e4m3's NaN."""
    if dtype.itemsize == 1:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, math.nan, dtype=dtype)


def _on_device(view: Tensor, device: str) -> Tensor:
    """Return a view with the same strides on the device; `Tensor.to` would pack it."""
    if device == "cpu":
        return view
    storage = _poison((view.untyped_storage().nbytes() // view.element_size(),), view.dtype)
    moved = storage.to(device).as_strided(view.shape, view.stride(), view.storage_offset())
    return moved.copy_(view)


@pytest.fixture
def reference() -> Callable[[PagedBatch], Tensor]:
    return paged_attention_reference


def paged_attention_reference(batch: PagedBatch) -> Tensor:
    """Return attention calculated in float64 on the CPU: each query of each request and head over all keys, with an
    explicit softmax.
    """
    softcap, sinks = batch.options.get("softcap"), batch.options.get("sinks")
    query = batch.query.double().cpu()
    starts = batch.query_start.tolist()
    num_heads = query.shape[1]
    out = torch.zeros(query.shape[0], num_heads, batch.v_cache.shape[3], dtype=torch.float64)
    for request, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        rows = slice(starts[request], starts[request + 1])
        num_queries, num_keys = rows.stop - rows.start, len(keys)
        if num_keys == 0:
            continue
        position, key_position = torch.arange(num_keys - num_queries, num_keys)[:, None], torch.arange(num_keys)
        unseen = (key_position > position) | (key_position < first_seen(position, batch.options))
        for head in range(num_heads):
            kv_head = head // (num_heads // batch.k_cache.shape[2])
            scores = query[rows, head] @ keys[:, kv_head].T * batch.scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(unseen, -math.inf)
            sink = sinks[head].double().cpu() if sinks is not None else torch.tensor(-math.inf, dtype=torch.float64)
            top = torch.maximum(scores.amax(1, keepdim=True), sink)
            weights = torch.exp(scores - top)
            mean = weights @ values[:, kv_head] / (weights.sum(1, keepdim=True) + torch.exp(sink - top))
            out[rows, head] = torch.where(unseen.all(1, keepdim=True), 0.0, mean)
    return out


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    return assert_errors_small


def assert_errors_small(found: Tensor, expected: Tensor) -> None:
    """Check the largest relative error, and the root mean square of all errors against that of all values.

    For bfloat16 a truncated last bit is accepted, because Triton's interpreter truncates.
    """
    limits = {torch.float32: (2e-5, 3e-6), torch.bfloat16: (1.2e-2, 6e-3), torch.float16: (2e-3, 1e-3)}
    largest, mean = limits[found.dtype]
    assert not torch.isnan(found).any(), "an output was not written, or poison leaked into it"
    error = (found.double().cpu() - expected).abs()
    size = expected.square().mean().sqrt().clamp(min=1e-3)
    assert (error / (size + expected.abs())).max().item() <= largest
    assert (error.square().mean().sqrt() / size).item() <= mean
