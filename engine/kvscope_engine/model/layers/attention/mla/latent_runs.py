"""Attention of query runs over latents. If it is cheaper, the latents are expanded to keys and values; otherwise the
queries are absorbed (converted to the dimension of the stored latents).

Decides between the two for each run, and computes the expansion. Only some heads are expanded at a time, which limits
the workspace and is possible because attention is independent per head. Short runs are absorbed together, like decodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvscope_engine.model.layers.attention.mla.latents import Latents
from kvscope_kernels import Ops
from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.latent_blocks import latent_blocks

EXPANDED_BYTES = 64 << 20
"""Maximum bytes of expanded keys and values at a time; at least one head is expanded."""
MAX_GROUPED_QUERIES = 512
"""Maximum number of query tokens in a group of absorbed runs (a single run may have more).

The maximum limits the workspace, because each query of a head becomes a vector of `stored_dim` elements.
"""
MAX_EXPANDED_TOKENS = 4096
"""Maximum number of tokens in a group of expanded requests, each padded to the longest. A single request may have more.
"""


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Consecutive runs of query tokens in a step that are all computed expanded, or all absorbed."""

    is_expanded: bool
    rows: slice
    """Batch rows of the group's queries."""
    requests: slice
    seq_lens: torch.Tensor
    start: torch.Tensor
    """First row of each run, in the form of `QueryRuns.start`."""
    max_len: int
    max_seq_len: int


def is_expanded(latents: Latents, num_queries: int, length: int) -> bool:
    """Whether a run of the last `num_queries` of `length` tokens needs fewer multiplications with expanded keys and
    values.
    """
    pairs = num_queries * length - num_queries * (num_queries - 1) // 2
    product = latents.latent_dim * (latents.content_dim + latents.value_dim)
    absorbed_cost = pairs * (latents.stored_dim + latents.latent_dim) + num_queries * product
    return pairs * (latents.key_dim + latents.value_dim) + length * product < absorbed_cost


def run_groups(latents: Latents, seq_lens: torch.Tensor, runs: QueryRuns, max_seq_len: int) -> tuple[RunGroup, ...]:
    """Divide the query runs of a step into groups. The result is the same for all layers."""
    host_lengths = runs.lengths
    if host_lengths is None:
        return (_by_bounds(latents, seq_lens, runs, max_seq_len),)
    starts, lengths = host_lengths.query_start.tolist(), host_lengths.seq_lens.tolist()
    sizes = [end - start for start, end in pairwise(starts)]
    is_long = [is_expanded(latents, size, length) for size, length in zip(sizes, lengths, strict=True)]
    return tuple(_groups(is_long, starts, sizes, lengths, seq_lens, runs))


def _by_bounds(latents: Latents, seq_lens: torch.Tensor, runs: QueryRuns, max_seq_len: int) -> RunGroup:
    """Return one group with all runs, for steps without lengths in host memory, which run only to compile kernels."""
    is_long = is_expanded(latents, runs.max_len, max_seq_len)
    return RunGroup(is_long, slice(None), slice(None), seq_lens, runs.start, runs.max_len, max_seq_len)


def _groups(
    is_long: list[bool],
    starts: list[int],
    sizes: list[int],
    lengths: list[int],
    seq_lens: torch.Tensor,
    runs: QueryRuns,
) -> Iterator[RunGroup]:
    for first, stop in _group_bounds(is_long, sizes, lengths):
        is_whole = stop - first == len(is_long)  # keep the tensors themselves: layers share plans by identity
        yield RunGroup(
            is_long[first],
            slice(starts[first], starts[stop]),
            slice(first, stop),
            seq_lens if is_whole else seq_lens[first:stop],
            runs.start if is_whole else runs.start[first : stop + 1] - starts[first],
            max(sizes[first:stop]),
            max(lengths[first:stop]),
        )


def _group_bounds(is_long: list[bool], sizes: list[int], lengths: list[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for stop in range(1, len(is_long) + 1):
        is_last = stop == len(is_long)
        if (
            is_last
            or is_long[stop] != is_long[first]
            or _exceeds_group_limit(is_long[first], first, stop + 1, sizes, lengths)
        ):
            yield first, stop
            first = stop


def _exceeds_group_limit(is_long: bool, first: int, stop: int, sizes: list[int], lengths: list[int]) -> bool:
    if is_long:
        return (stop - first) * max(lengths[first:stop]) > MAX_EXPANDED_TOKENS
    return sum(sizes[first:stop]) > MAX_GROUPED_QUERIES


def attend_runs(
    ops: Ops, latents: Latents, args: AttentionArgs, groups: tuple[RunGroup, ...], plans: DecodePlans | None
) -> torch.Tensor:
    """Compute attention of queries (T, H, key_dim) over stored latents -> (T, H, value_dim), in `args.out` if given."""
    out = args.out
    if out is None:
        out = args.query.new_empty(*args.query.shape[:2], latents.value_dim)
    for group in groups:
        group_args = args._replace(
            query=args.query[group.rows],
            block_tables=args.block_tables[group.requests],
            seq_lens=group.seq_lens,
            max_seq_len=group.max_seq_len,
            out=out[group.rows],
        )
        if group.is_expanded:
            _attend_expanded(ops, latents, group_args, QueryRuns(group.start, group.max_len))
        else:
            stored = group_args._replace(query=latents.absorb(group_args.query), out=None)
            runs = QueryRuns(group.start, group.max_len, None, plans)
            latents.values(ops.latent_prefill(stored, runs), group_args.out)
    return out


def _attend_expanded(ops: Ops, latents: Latents, args: AttentionArgs, runs: QueryRuns) -> None:
    """Compute attention over temporary blocks with expanded keys and values, some heads at a time."""
    assert args.out is not None, "made for all groups"
    assert args.max_seq_len is not None, "given with the group"
    num_cached_blocks, block_size = args.k_cache.shape[:2]
    tables = args.block_tables[:, : -(-args.max_seq_len // block_size)]
    num_blocks = tables.numel()
    block_ids = tables.reshape(-1).clamp(0, num_cached_blocks - 1)  # entries after a request's own blocks are arbitrary
    stored = latent_blocks(args, block_ids).view(-1, latents.stored_dim)
    tables = torch.arange(num_blocks, dtype=torch.int32, device=stored.device).view(tables.shape)
    step = heads_at_once(latents, len(stored), stored.element_size())
    for first in range(0, latents.num_heads, step):
        heads = slice(first, min(first + step, latents.num_heads))
        keys, values = latents.expand(stored, first, heads.stop - first)
        head_args = args._replace(
            query=args.query[:, heads],
            k_cache=keys.view(num_blocks, block_size, *keys.shape[1:]),
            v_cache=values.view(num_blocks, block_size, *values.shape[1:]),
            block_tables=tables,
            k_scale=None,
            v_scale=None,
            sinks=None if args.sinks is None else args.sinks[heads],
            out=args.out[:, heads],
        )
        ops.prefill(head_args, runs)


def expanded_bytes(latents: Latents, num_tokens: int, element_bytes: int) -> int:
    """Return the workspace bytes for expanding requests of up to `num_tokens`: a copy of the stored data, and
    the keys and values of the heads that are expanded at a time.
    """
    num_tokens = max(num_tokens, MAX_EXPANDED_TOKENS)
    stored = num_tokens * latents.stored_dim * element_bytes
    return stored + heads_at_once(latents, num_tokens, element_bytes) * _head_bytes(latents, num_tokens, element_bytes)


def heads_at_once(latents: Latents, num_tokens: int, element_bytes: int) -> int:
    return min(latents.num_heads, max(1, EXPANDED_BYTES // _head_bytes(latents, num_tokens, element_bytes)))


def _head_bytes(latents: Latents, num_tokens: int, element_bytes: int) -> int:
    """Return the workspace bytes for one head: the matmul's output, the keys copied from it, and the values."""
    return num_tokens * (2 * latents.content_dim + latents.rotary_dim + latents.value_dim) * element_bytes
