"""Attention with a relative position bias, compared with transformers' computation over all pairs of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape
from kvscope_engine.model.layers.attention import query_bias
from kvscope_engine.model.layers.attention.paged_attention import AttentionOptions, DecodeBatch, PagedContext
from kvscope_engine.model.layers.attention.query_bias import QueryBias, attend_with_bias
from kvscope_kernels import ops_for
from kvscope_kernels.attention_args import AttentionArgs

HEADS, KV_HEADS, DIM, BLOCK, D_REL = 4, 2, 8, 4, 6


@pytest.mark.parametrize("max_scores", [1 << 24, HEADS * 19 * 2])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("num_queries", "extent", "has_sinks"), [(1, 32, True), (7, 6, False), (19, 6, True)])
def test_position_bias_equals_transformers(
    num_queries: int, extent: int, has_sinks: bool, window: int | None, max_scores: int, monkeypatch: Any
) -> None:
    from transformers.models.inkling2.modeling_inkling2 import Inkling2RelativeLogits, eager_attention_forward

    monkeypatch.setattr(query_bias, "_MAX_SCORES", max_scores)
    torch.manual_seed(num_queries)
    num_tokens = 19
    made: Any = Inkling2RelativeLogits(D_REL, extent)
    torch.nn.init.normal_(made.proj)
    query, states = torch.randn(num_queries, HEADS, DIM), torch.randn(1, num_queries, HEADS, D_REL)
    keys, values = torch.randn(2, num_tokens, KV_HEADS, DIM).unbind()
    sinks = torch.randn(num_queries, HEADS) if has_sinks else None
    table = torch.randperm(9)[: -(-num_tokens // BLOCK)]
    caches = torch.full((2, 9, BLOCK, KV_HEADS, DIM), float("nan"))
    for token in range(num_tokens):
        caches[0, table[token // BLOCK], token % BLOCK] = keys[token]
        caches[1, table[token // BLOCK], token % BLOCK] = values[token]
    lengths = torch.tensor([num_tokens], dtype=torch.int32)
    args = AttentionArgs(query, caches[0], caches[1], table[None].int(), lengths, 0.3, window)
    with torch.inference_mode():
        found = attend_with_bias(args, QueryBias((states @ made.proj)[0], sinks), num_tokens)
        at, of = torch.arange(num_tokens - num_queries, num_tokens), torch.arange(num_tokens)
        distance = at[:, None] - of
        hidden = (distance < 0) | (distance >= (window or num_tokens))
        wanted, _ = eager_attention_forward(
            SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False),
            *(each[None].transpose(1, 2) for each in (query, keys, values)),
            torch.zeros(hidden.shape).masked_fill(hidden, float("-inf")),
            0.3,
            position_bias=made(states, at, of),
            sinks=None if sinks is None else sinks.T[None, :, :, None],
        )
    torch.testing.assert_close(found, wanted[0], atol=1e-5, rtol=1e-5)


def test_padding_rows_attend_to_nothing() -> None:
    """Such rows are in the steps that compile kernels at the start."""
    storage = KVStorage(4, BLOCK, [LayerShape(KV_HEADS, DIM)], torch.float32, torch.device("cpu"))
    lengths, tables = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    slots = torch.full((2,), -1)
    context = PagedContext(storage, ops_for("cpu"), (slots,), 2, DecodeBatch((tables,), lengths, BLOCK), None)
    options = AttentionOptions(0.3, bias=QueryBias(torch.randn(2, HEADS, D_REL)))
    assert not context.attend_written(torch.randn(2, HEADS, DIM), storage.layer(0), options).any()
