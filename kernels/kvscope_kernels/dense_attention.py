"""Attention over dense, zero-padded keys and values, for the torch references. Independent of blocks."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_MAX_SCORES = 1 << 24  # maximum per call of `_attend_explicitly`: 64 MiB in float32


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 for visible tokens and -inf for `hidden` ones. Torch's fused CPU kernel uses such a mask without
    conversion.
    """
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    is_causal: bool = False,
) -> Tensor:
    """Return softmax(scale * query keys^T) values, with softcap, mask and sinks, by torch's fused kernel if possible.

    Args:
        query: (n, num_kv_heads, group, num_queries, head_dim).
        keys: (n, num_tokens, num_kv_heads, head_dim).
        values: (n, num_tokens, num_kv_heads, value_dim).
        hidden: (n or 1, num_queries or 1, num_tokens) bool, or None if all are visible; no row may be hidden
            completely.
        scale: Factor by which scores are multiplied.
        softcap: Scores are limited to softcap * tanh(score / softcap); None for no limit.
        sinks: (num_kv_heads * group,), or None for a model without sinks.
        is_causal: Whether query i attends to tokens 0..i; requires hidden=None, and neither softcap nor sinks.

    Returns:
        (n, num_kv_heads, group, num_queries, value_dim).
    """
    if softcap is None and sinks is None:
        return _attend_fused(query, keys.transpose(1, 2), values.transpose(1, 2), hidden, scale, is_causal)
    step = max(1, _MAX_SCORES // max(1, query.shape[:3].numel() * keys.shape[1]))
    pieces = []
    for start in range(0, query.shape[3], step):
        part = slice(start, start + step)
        mask = hidden[:, part] if hidden is not None and hidden.shape[1] > 1 else hidden
        pieces.append(_attend_explicitly(query[:, :, :, part], keys, values, mask, scale, softcap, sinks))
    return torch.cat(pieces, dim=3)


def _attend_fused(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    n, num_kv_heads, group, num_queries, _ = query.shape
    mask = None if hidden is None else additive_mask(hidden, query.dtype)[:, None]
    if num_queries == 1:  # the group's heads are the rows of one tile: no key is read twice
        rows = query.squeeze(3)
        return scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale).unsqueeze(3)
    heads = scaled_dot_product_attention(
        query.flatten(1, 2),
        keys,
        values,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=group > 1,
    )
    return heads.view(n, num_kv_heads, group, num_queries, -1)


def _attend_explicitly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute `attend` in float32 for any input dtype, because rounded scores would lose more accuracy than
    bfloat16 inputs.
    """
    n, num_kv_heads, group, num_queries, _ = query.shape
    rows = query.reshape(n, num_kv_heads, group * num_queries, -1).float() * scale
    scores = torch.matmul(rows, keys.permute(0, 2, 3, 1).float())
    scores = scores.view(n, num_kv_heads, group, num_queries, -1)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        scores = scores.masked_fill_(hidden[:, None, None], float("-inf"))
    weights = _softmax_with_sinks(scores, sinks).view(n, num_kv_heads, group * num_queries, -1)
    out = torch.matmul(weights, values.transpose(1, 2).float())
    return out.view(n, num_kv_heads, group, num_queries, -1).to(query.dtype)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return exp(s_i) / (sum_j exp(s_j) + exp(sink)) along the last axis."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float().view(scores.shape[1], scores.shape[2], 1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = (scores - top).exp_()
    return weights.div_(weights.sum(-1, keepdim=True) + torch.exp(sink - top))
