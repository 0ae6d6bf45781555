"""What `--sparse-decode` does to a model: perplexity and time of its decode steps at several fractions.

The engine's own blocks, bounds and operations, one request. All but the last tokens of a text are read as a prompt is;
these are then decoded one by one, once with each fraction, over the same blocks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypedDict

import torch

from kvscope_engine.model.running.attention import DecodeBatch, PagedContext, PrefillBatch
from kvscope_engine.model.running.forward import Forward
from kvscope_engine.model.running.kv_storage import KVStorage
from kvscope_engine.model.running.storage_for_model import storage_for_model
from kvscope_engine.model.sparse.page_choice import PageChoice
from kvscope_kernels import Ops, ops_for

if TYPE_CHECKING:
    from kvscope_engine.model.loading.loader import LoadedModel

FRACTIONS: Final = (1.0, 0.5, 0.25, 0.125)
BLOCK_SIZE: Final = 16
CHUNK_TOKENS: Final = 256


class SparseRow(TypedDict):
    """Of one fraction."""

    fraction: float
    num_attended_blocks: int
    perplexity: float
    perplexity_change: float
    """Against full attention, as a share."""
    step_ms: float


def sparse_quality(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    num_scored: int,
    tell: Callable[[str], None],
    fractions: Sequence[float] = FRACTIONS,
) -> list[SparseRow]:
    """The first of `fractions` is what the others are compared with."""
    storage = storage_for_model(loaded, -(-len(token_ids) // BLOCK_SIZE), BLOCK_SIZE, sparse_decode=1.0)
    reading = _Reading(loaded, storage, torch.tensor(token_ids, device=loaded.device))
    start = len(token_ids) - num_scored
    rows: list[SparseRow] = []
    with torch.inference_mode():
        for begin in range(0, start, CHUNK_TOKENS):
            tell(f"sparse decode: {begin} of {start} tokens read")
            reading.fill(begin, min(begin + CHUNK_TOKENS, start))
        for fraction in fractions:
            tell(f"sparse decode: {fraction:g}")
            choice = PageChoice(fraction, BLOCK_SIZE, reading.ops)
            perplexity, step_s = reading.decode(start, choice)
            full = rows[0]["perplexity"] if rows else perplexity
            rows.append(
                {
                    "fraction": fraction,
                    "num_attended_blocks": choice.num_attended(storage.num_blocks),
                    "perplexity": perplexity,
                    "perplexity_change": perplexity / full - 1.0,
                    "step_ms": step_s * 1e3,
                }
            )
    storage.close()
    return rows


class _Reading:
    """A text and its blocks, which are in a row: a position is a slot."""

    def __init__(self, loaded: LoadedModel, storage: KVStorage, ids: torch.Tensor) -> None:
        self.ops: Ops = ops_for(loaded.device.type)
        self._forward, self._storage, self._ids = Forward(loaded.module), storage, ids
        self._tables = torch.arange(storage.num_blocks, dtype=torch.int32, device=ids.device)[None]

    def fill(self, start: int, end: int) -> None:
        """A piece of the prompt."""
        prefill = PrefillBatch(
            block_tables=self._tables,
            seq_lens=self._ints(end),
            max_seq_len=end,
            query_start=self._ints(0, end - start),
            max_query_len=end - start,
        )
        slots = torch.arange(start, end, device=self._ids.device)
        context = PagedContext(self._storage, self.ops, slots, 0, None, prefill)
        self._forward.fill(self._ids[start:end], slots, context)

    def decode(self, start: int, choice: PageChoice) -> tuple[float, float]:
        """Perplexity of the tokens behind `start`, and the median time of a step."""
        total, took = 0.0, []
        for place in range(start, len(self._ids) - 1):
            slots = torch.tensor([place], device=self._ids.device)
            batch = DecodeBatch(self._tables, self._ints(place + 1), place + 1)
            context = PagedContext(self._storage, self.ops, slots, 1, batch, None, choice=choice)
            began = time.perf_counter()
            logits = self._forward.logits(self._ids[place : place + 1], slots, context)
            total -= float(logits[0].double().log_softmax(-1)[self._ids[place + 1]])
            took.append(time.perf_counter() - began)
        return math.exp(total / len(took)), statistics.median(took)

    def _ints(self, *numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._ids.device)
