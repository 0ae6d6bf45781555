"""Paged caches with random content for benchmarks. A benchmark cycles through several caches that together
exceed the GPU's L2 cache, so that every read is from memory.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWorkload:
    """Shape of a batch for one attention layer: lengths of its requests, and the layer's heads."""

    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...] | None = None
    """Number of new tokens of each request; None for decode, with one token each."""
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    """Dtype of the cache; None if it is `dtype`."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and scales that decode must read."""
        if self.kv_dtype is None:
            vector_bytes = self.head_dim * self.dtype.itemsize
        else:
            vector_bytes = self.head_dim * self.kv_dtype.itemsize + torch.float32.itemsize
        return sum(self.seq_lens) * self.num_kv_heads * 2 * vector_bytes

    @property
    def num_queries(self) -> int:
        return sum(num_queries for num_queries, _ in self._lengths())

    @property
    def flops(self) -> int:
        """FLOPs of causal prefill: two matmuls with 2 * head_dim FLOPs each for every head and visible pair of
        tokens.
        """
        pairs = sum(n * (length - n) + n * (n + 1) // 2 for n, length in self._lengths())
        return 4 * self.num_heads * self.head_dim * pairs

    def _lengths(self) -> list[tuple[int, int]]:
        return list(zip(self.query_lens or [1] * len(self.seq_lens), self.seq_lens, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One layer's cache, and a batch of requests whose blocks are in the cache."""

    storage: Tensor
    """Keys and values, (num_blocks, 2, num_kv_heads, block_size, head_dim)."""
    scales: Tensor | None
    """Scales of keys and values, (num_blocks, 2, num_kv_heads, block_size); None unless the cache is quantized."""
    query: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    out: Tensor
    max_seq_len: int
    max_query_len: int
    scale: float

    @property
    def k_cache(self) -> Tensor:
        """(num_blocks, block_size, num_kv_heads, head_dim)"""
        return self.storage[:, 0].transpose(1, 2)

    @property
    def v_cache(self) -> Tensor:
        """(num_blocks, block_size, num_kv_heads, head_dim)"""
        return self.storage[:, 1].transpose(1, 2)

    @property
    def k_scale(self) -> Tensor | None:
        """(num_blocks, block_size, num_kv_heads)"""
        return None if self.scales is None else self.scales[:, 0].transpose(1, 2)

    @property
    def v_scale(self) -> Tensor | None:
        """(num_blocks, block_size, num_kv_heads)"""
        return None if self.scales is None else self.scales[:, 1].transpose(1, 2)

    @property
    def words(self) -> Tensor:
        """All keys and values of the cache, but not their scales, viewed as a contiguous int32 vector."""
        return self.storage.view(-1).view(torch.int32)

    def attention_args(
        self, out: Tensor | None = None, *, sliding_window: int | None = None, softcap: float | None = None
    ) -> AttentionArgs:
        return AttentionArgs(
            self.query,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            self.scale,
            sliding_window=sliding_window,
            softcap=softcap,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            max_seq_len=self.max_seq_len,
            out=out,
        )

    def last_slots(self) -> Tensor:
        """Return the slots of the new tokens, which are the last tokens of each request: (num_queries,) int64."""
        num_queries = self.query_start.diff().to(torch.int64)
        request = torch.arange(len(self.seq_lens), device=self.query.device).repeat_interleave(num_queries)
        row = torch.arange(len(self.query), device=self.query.device)
        position = self.seq_lens[request] - self.query_start[request + 1] + row
        block_size = self.storage.shape[3]
        block = self.block_tables[request, position // block_size].to(torch.int64)
        return block * block_size + position % block_size


def make_pool(work: AttentionWorkload, device: str, *, is_permuted: bool = True, storage: Tensor | None = None) -> Pool:
    """Create a pool with blocks in random order, or sequential unless `is_permuted`.

    `storage` may be that of another pool of the same size.
    """
    cuts = [-(-length // work.block_size) for length in work.seq_lens]
    num_blocks = sum(cuts)
    if storage is None:
        shape = (num_blocks, 2, work.num_kv_heads, work.block_size, work.head_dim)
        storage = _random_storage(shape, device, work)
    blocks = torch.randperm(num_blocks) if is_permuted else torch.arange(num_blocks)
    tables = torch.zeros(len(cuts), max(cuts), dtype=torch.int32)
    for row, run in zip(tables, torch.split(blocks, cuts), strict=True):
        row[: len(run)] = run
    query_lens = work.query_lens or (1,) * len(cuts)
    query = torch.randn(sum(query_lens), work.num_heads, work.head_dim, device=device, dtype=work.dtype)
    return Pool(
        storage=storage,
        scales=None if work.kv_dtype is None else torch.rand(storage.shape[:-1], device=device) / 100,
        query=query,
        block_tables=tables.to(device),
        seq_lens=torch.tensor(work.seq_lens, dtype=torch.int32, device=device),
        query_start=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device),
        out=torch.empty_like(query),
        max_seq_len=max(work.seq_lens),
        max_query_len=max(query_lens),
        scale=1.0 / math.sqrt(work.head_dim),
    )


def _random_storage(shape: tuple[int, ...], device: str, work: AttentionWorkload) -> Tensor:
    if work.kv_dtype is None:
        return torch.randn(shape, device=device, dtype=work.dtype)
    return torch.randint(0, 0x7F, shape, device=device, dtype=torch.uint8).view(work.kv_dtype)  # all finite
