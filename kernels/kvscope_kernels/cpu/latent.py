"""Decode attention over latents (MLA) on a CPU, by the faster of two compiled operations."""

import torch
from torch import Tensor

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.cpu.decode import paged_decode_attention_native
from kvscope_kernels.cpu.prefill import paged_prefill_attention_native
from kvscope_kernels.decode.plan import DecodePlans
from kvscope_kernels.latent_blocks import plain_latents

_FEWEST_HEADS = {torch.bfloat16: 16, torch.float32: 32}
"""Minimum number of query heads, by dtype, from which latent decode uses the prefill operation, which packs tiles.

With bfloat16, the prefill operation takes a quarter of the decode operation's time for 128 heads, and 0.7 of that time
for 16 heads. With float32, it would take twice the decode operation's time for 16 heads.
"""


def latent_decode_native(args: AttentionArgs, plans: DecodePlans | None = None, shares: Tensor | None = None) -> Tensor:
    """Run `paged_decode_attention` for a model whose query heads all share one KV head."""
    args = plain_latents(args)
    query = args.query
    if shares is not None or query.shape[1] < _FEWEST_HEADS.get(query.dtype, 1 << 20):
        return paged_decode_attention_native(args, plans, shares)
    return paged_prefill_attention_native(args, QueryRuns(torch.arange(len(query) + 1, dtype=torch.int32), 1))


def latent_prefill_native(args: AttentionArgs, runs: QueryRuns) -> Tensor:
    """Run `paged_prefill_attention` for a model whose query heads all share one KV head."""
    return paged_prefill_attention_native(plain_latents(args), runs)
