"""What is asked: the memory and the requests of a mirror. O(requests); no block is looked at."""

from __future__ import annotations

import numpy as np

from kvscope_app.views.what_if.process import Rows
from kvscope_telemetry.messages.request_words import RequestState
from kvscope_telemetry.messages.what_if import HOST_PAGE_BYTES, MAX_REQUESTS, PAGE_BYTES, Memory
from kvscope_telemetry.state.mirror import Mirror


def memory_of(mirror: Mirror) -> Memory | None:
    """The engine's KV memory; None before there is an engine, or when it has no blocks."""
    if mirror.hello is None or not mirror.hello.cache.num_blocks:
        return None
    cache, model = mirror.hello.cache, mirror.hello.model
    return Memory(
        num_blocks=cache.num_physical_blocks or cache.num_blocks,
        block_size=cache.block_size,
        block_bytes=cache.block_bytes,
        num_layers=model.num_layers,
        max_model_len=model.max_model_len,
        allocator=cache.allocator,
        page_bytes=PAGE_BYTES if mirror.hello.device.kind == "cuda" else HOST_PAGE_BYTES,
    )


def running_rows(mirror: Mirror) -> Rows:
    """The requests that hold blocks, the oldest first: number, tokens computed, limit (0: unknown), prompt."""
    requests = mirror.requests
    holds = (requests.state == RequestState.RUNNING) & (requests.num_blocks > 0) & (requests.num_computed_tokens > 0)
    rows = np.flatnonzero(holds)[:MAX_REQUESTS]
    prompt, limit = requests.num_prompt_tokens[rows], requests.max_tokens[rows]
    limits = np.where(limit > 0, prompt + limit, 0)
    columns = (requests.number[rows], requests.num_computed_tokens[rows], limits, prompt)
    result: Rows = np.stack(columns, axis=1).tolist()
    return result
