"""Share of a decode's attention that each block of the request gets.

Torch reference for the shares that decode attention computes in its own pass (`merge_splits`), and the implementation
for CPUs without a C compiler.
"""

import torch
from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.checks import check_attention, require
from kvscope_kernels.host_lengths import Lengths, similar_groups
from kvscope_kernels.kv_gather import gather_keys
from kvscope_kernels.latent_blocks import plain_latents
from kvscope_kernels.triton_language import cdiv

_CALL_COST_ELEMENTS = 1 << 17  # elements read in the time of one more torch call, on one CPU thread


def block_attention_torch(args: AttentionArgs, shares: Tensor) -> None:
    """Add to `shares` the share of each request's attention that each of its blocks gets, as the mean over heads.

    With s_j as in `paged_decode_attention`, without sinks, and C_i the positions of the request's i-th block:

        shares[b, i] += mean over h of  sum_{j in C_i} exp(s_j) / sum_j exp(s_j)

    So a call adds 1 to the sum of each row, or nothing if the request has no tokens. Reads lengths on the host.

    Args:
        args: As for decode attention.
        shares: (batch, at least max_blocks or as many as max_seq_len needs) float32, contiguous.

    Raises:
        ValueError: Unsupported arguments.

    Source: attention per token as in H2O (arXiv 2306.14048), summed by blocks as in Quest (2406.10774).
    """
    args = plain_latents(args)
    _check(args, shares)
    query, k_cache = args.query, args.k_cache
    end = args.seq_lens.cpu().numpy().astype("int64")
    first = args.first_seen(end - 1)
    call_cost = _CALL_COST_ELEMENTS // (k_cache.shape[2] * k_cache.shape[3])
    for rows in similar_groups(end - first, call_cost):
        if not end[rows].any():
            continue
        selected = torch.from_numpy(rows).to(query.device)
        part = args._replace(query=query[selected], block_tables=args.block_tables[selected])
        group_shares = _shares(part, first[rows], end[rows])
        shares[selected, : group_shares.shape[1]] += group_shares


def _shares(args: AttentionArgs, first: Lengths, end: Lengths) -> Tensor:
    query, softcap = args.query, args.softcap
    n, num_heads, head_dim = query.shape
    block_size, num_kv_heads = args.k_cache.shape[1:3]
    width = cdiv(int(end.max()), block_size)
    keys = gather_keys(args.cache, args.block_tables[:, :width], query.dtype)
    rows = query.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.matmul(rows, keys.permute(0, 2, 3, 1)).float().mul_(args.scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    token = torch.arange(scores.shape[-1], device=query.device)
    begins, ends = (torch.from_numpy(each).to(query.device)[:, None] for each in (first, end))
    hidden = (token < begins) | (token >= ends)
    scores = scores.masked_fill_(hidden[:, None, None], float("-inf"))
    weights = scores.softmax(-1).nan_to_num_(nan=0.0)
    return weights.view(n, num_heads, width, block_size).sum(-1).mean(1)


def _check(args: AttentionArgs, shares: Tensor) -> None:
    check_attention(args)
    if len(args.query) != len(args.seq_lens):
        require(False, "query", args.query, f"one row for each of {len(args.seq_lens)} seq_lens")
    check_shares(args.query, shares)


def check_shares(query: Tensor, shares: Tensor, min_blocks: int = 0) -> None:
    """Check that `shares` has one row per row of `query`, with at least `min_blocks` blocks. Raises ValueError."""
    if shares.dim() != 2 or shares.dtype != torch.float32 or len(shares) != len(query) or shares.stride(1) != 1:
        require(False, "shares", shares, f"({len(query)}, blocks) float32, contiguous,")
    if shares.shape[1] < min_blocks:
        require(False, "shares", shares, f"at least {min_blocks} blocks wide")
