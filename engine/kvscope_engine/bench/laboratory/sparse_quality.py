"""Effect of `--sparse-decode` on a model: perplexity and time of decode steps at several fractions of the blocks.

Uses the engine's blocks, key bounds and operations, with one request. All but the last tokens of a text are prefilled;
the last ones are decoded one at a time, once per fraction, over the same blocks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict

import torch
from torch.nn.functional import kl_div

from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.model.layers.attention.paged_attention import DecodeBatch, PagedContext, PrefillBatch
from kvscope_engine.model.layers.attention.sparse.page_choice import PageChoice
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.runner.kv_cache_spec import storage_for_model
from kvscope_kernels import Ops, ops_for

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel

FRACTIONS: Final = (1.0, 0.5, 0.25, 0.125)
BLOCK_SIZE: Final = 16
CHUNK_TOKENS: Final = 256


class SparseRow(TypedDict):
    fraction: float
    num_attended_blocks: int
    perplexity: float
    perplexity_change: float
    """Relative change of the perplexity compared with full attention."""
    perplexity_error: float | None
    """Standard error of `perplexity_change`, from its variation over the tokens; None for a single token."""
    divergence: float
    """Mean Kullback-Leibler divergence from the predictions of full attention, in nats per token. It distinguishes two
    block selections even if the text is too short for a difference in perplexity.
    """
    step_ms: float


def sparse_quality(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    num_scored: int,
    show_progress: Callable[[str], None],
    fractions: Sequence[float] = FRACTIONS,
) -> list[SparseRow]:
    """Measure each fraction. The first of `fractions` is the baseline with which all others are compared."""
    storage = storage_for_model(loaded, -(-len(token_ids) // BLOCK_SIZE), BLOCK_SIZE, sparse_decode=1.0)
    text_run = _TextRun(loaded, storage, torch.tensor(token_ids, device=loaded.device))
    start = len(token_ids) - num_scored
    rows: list[SparseRow] = []
    with torch.inference_mode():
        for begin in range(0, start, CHUNK_TOKENS):
            show_progress(f"sparse decode: {begin} of {start} tokens read")
            text_run.fill(begin, min(begin + CHUNK_TOKENS, start))
        full: _Predictions | None = None
        for fraction in fractions:
            show_progress(f"sparse decode: {fraction:g}")
            choice = PageChoice(fraction, BLOCK_SIZE, text_run.ops)
            answers = text_run.decode(start, choice)
            full = full or answers
            rows.append(_row(fraction, choice.num_attended(storage.num_blocks), answers, full))
    storage.close()
    return rows


@dataclass(frozen=True, slots=True)
class _Predictions:
    log_probs: torch.Tensor
    """Log-probabilities, (n, vocabulary) float32, on the host."""
    surprises: torch.Tensor
    """Negative log-probability of the actual next token, (n,) float64."""
    step_s: float


def _row(fraction: float, num_attended_blocks: int, answers: _Predictions, full: _Predictions) -> SparseRow:
    surprise_change = answers.surprises - full.surprises
    ratio = math.exp(float(surprise_change.mean()))
    return {
        "fraction": fraction,
        "num_attended_blocks": num_attended_blocks,
        "perplexity": math.exp(float(answers.surprises.mean())),
        "perplexity_change": ratio - 1.0,
        "perplexity_error": ratio * float(surprise_change.std()) / math.sqrt(len(surprise_change))
        if len(surprise_change) > 1
        else None,
        "divergence": float(kl_div(answers.log_probs, full.log_probs, reduction="batchmean", log_target=True)),
        "step_ms": answers.step_s * 1e3,
    }


class _TextRun:
    """Text and its contiguous blocks, in which a token's slot equals its position."""

    def __init__(self, loaded: LoadedModel, storage: KVStorage, ids: torch.Tensor) -> None:
        self.ops: Ops = ops_for(loaded.device.type)
        self._forward, self._storage, self._ids = Forward(loaded.module), storage, ids
        self._tables = torch.arange(storage.num_blocks, dtype=torch.int32, device=ids.device)[None]

    def fill(self, start: int, end: int) -> None:
        prefill = PrefillBatch(
            block_tables=(self._tables,),
            seq_lens=self._ints(end),
            max_seq_len=end,
            query_start=self._ints(0, end - start),
            max_query_len=end - start,
        )
        slots = torch.arange(start, end, device=self._ids.device)
        context = PagedContext(self._storage, self.ops, (slots,), 0, None, prefill)
        self._forward.fill(self._ids[start:end], slots, context)

    def decode(self, start: int, choice: PageChoice) -> _Predictions:
        predictions, step_times_s = [], []
        for position in range(start, len(self._ids) - 1):
            slots = torch.tensor([position], device=self._ids.device)
            batch = DecodeBatch((self._tables,), self._ints(position + 1), position + 1)
            context = PagedContext(self._storage, self.ops, (slots,), 1, batch, None, choice=choice)
            start_s = time.perf_counter()
            logits = self._forward.logits(self._ids[position : position + 1], slots, context)
            predictions.append(logits[0].float().log_softmax(-1).cpu())
            step_times_s.append(time.perf_counter() - start_s)
        rows, next_ids = torch.stack(predictions), self._ids[start + 1 :, None].cpu()
        return _Predictions(rows, -rows.gather(1, next_ids)[:, 0].double(), statistics.median(step_times_s))

    def _ints(self, *numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._ids.device)
