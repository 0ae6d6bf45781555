"""Perplexity of a text read through the paged KV cache, to measure what a cache format costs in quality.

Each chunk of the text is written to blocks and attends to them as in the engine, so that the model reads earlier tokens
only from blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.layers.attention.paged_attention import PagedContext, PrefillBatch
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.runner.kv_cache_spec import storage_for_model
from kvscope_kernels import ops_for

CHUNK_TOKENS = 256
BLOCK_SIZE = 16


def perplexity(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    kv_cache_dtype: str,
    show_progress: Callable[[int], None] = lambda done: None,
) -> float:
    """Return exp(mean of -log p(token | all tokens before it)) over every token except the first.

    The progress callback gets the number of tokens done.
    """
    storage = storage_for_model(loaded, -(-len(token_ids) // BLOCK_SIZE), BLOCK_SIZE, kv_cache_dtype)
    forward, ids = Forward(loaded.module), torch.tensor(token_ids, device=loaded.device)
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(ids), CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, len(ids))
            logits = _chunk_logits(forward, storage, ids, start, end)
            targets = ids[start + 1 : end + 1]
            total -= float(logits[: len(targets)].double().log_softmax(-1).gather(1, targets[:, None]).sum())
            show_progress(end)
    storage.close()
    return math.exp(total / (len(ids) - 1))


def _chunk_logits(forward: Forward, storage: KVStorage, ids: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return logits of shape (end - start, vocabulary). Blocks are in order, so a token's slot equals its position."""
    positions = torch.arange(start, end, device=ids.device)
    prefill = PrefillBatch(
        block_tables=(torch.arange(storage.num_blocks, dtype=torch.int32, device=ids.device)[None],),
        seq_lens=torch.tensor([end], dtype=torch.int32, device=ids.device),
        max_seq_len=end,
        query_start=torch.tensor([0, end - start], dtype=torch.int32, device=ids.device),
        max_query_len=end - start,
    )
    context = PagedContext(
        storage=storage,
        ops=ops_for(ids.device.type),
        slot_mapping=(positions,),
        num_single_token=0,
        decode=None,
        prefill=prefill,
    )
    return forward.logits(ids[start:end], positions, context)
