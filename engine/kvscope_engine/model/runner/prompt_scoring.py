"""Log-probabilities of a prompt's own tokens (`SamplingParams.prompt_logprobs`), computed while the prompt is
prefilled.

The LM head runs on a bounded number of rows at a time, because the logits of a whole prefill chunk may be larger than
the memory that is planned for a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.policy.step_plan import Scheduled
from kvscope_telemetry.messages.commands import TokenLogprobs

MAX_LOGITS_BYTES: Final = 64 << 20
"""Maximum size of the float32 logits that are computed at a time."""


class ScoredItem(NamedTuple):
    """Part of a prompt whose tokens are scored in a step."""

    scheduled_index: int
    """Index of the request in `StepPlan.scheduled`."""
    token_ids: list[int]
    """The scored tokens: each is the successor of a token that the step computes."""
    num_top: int


class PromptRows(NamedTuple):
    items: list[ScoredItem]
    rows: list[int]
    """For each scored token, the row of the batch whose logits predict it."""


class PendingScores(NamedTuple):
    """Scores on the device. `table` has one row per token: log-probability, rank, top ids, top log-probabilities."""

    items: list[ScoredItem]
    table: torch.Tensor

    def read(self, num_scheduled: int) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """Wait for the device. Returns the scores of each scheduled request, empty for those without."""
        table = self.table.tolist()
        scores: list[tuple[TokenLogprobs, ...]] = [()] * num_scheduled
        start, width = 0, (self.table.shape[1] - 2) // 2
        for scheduled_index, token_ids, num_top in self.items:
            entries = []
            for token_id, (logprob, rank, *top) in zip(token_ids, table[start : start + len(token_ids)], strict=True):
                pairs = zip(map(int, top[: min(num_top, width)]), top[width:], strict=False)
                entries.append(TokenLogprobs(token_id=token_id, logprob=logprob, top=tuple(pairs), rank=int(rank)))
            scores[scheduled_index] = tuple(entries)
            start += len(token_ids)
        return tuple(scores)


def prompt_rows(scheduled: Sequence[Scheduled]) -> PromptRows | None:
    """Return the rows of a step whose logits score prompt tokens; None if no request asks for any."""
    items: list[ScoredItem] = []
    rows: list[int] = []
    first_row = 0
    for index, (request, start, num_tokens, *_) in enumerate(scheduled):
        end = min(start + num_tokens, request.num_prompt_tokens - 1)  # the last token's successor is sampled
        if request.scores_prompt and start < end:
            token_ids = list(request.prompt_token_ids[start + 1 : end + 1])
            items.append(ScoredItem(index, token_ids, request.sampling.prompt_logprobs or 0))
            rows += range(first_row, first_row + end - start)
        first_row += num_tokens
    return PromptRows(items, rows) if items else None


def score_prompts(model: Forward, hidden: torch.Tensor, prompts: PromptRows, vocab_size: int) -> PendingScores:
    """Enqueue the scoring of `prompts` from hidden states of shape (T, hidden), without waiting for it."""
    device = hidden.device
    rows = torch.tensor(prompts.rows, device=device)
    targets = torch.tensor([token for item in prompts.items for token in item.token_ids], device=device)
    num_top = min(max(item.num_top for item in prompts.items), vocab_size)
    size = max(1, MAX_LOGITS_BYTES // (4 * vocab_size))
    pieces = [
        _score(model.logits_of(hidden, row_piece).float(), target_piece[:, None], num_top)
        for row_piece, target_piece in zip(torch.split(rows, size), torch.split(targets, size), strict=True)
    ]
    return PendingScores(prompts.items, torch.cat(pieces))


def _score(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the rows of `PendingScores.table`, float64, for logits (n, vocabulary) and targets (n, 1)."""
    ranks = (logits > logits.gather(-1, targets)).sum(-1, keepdim=True) + 1
    values = logits.log_softmax(-1)
    top = values.topk(num_top)
    columns = (values.gather(-1, targets), ranks, top.indices, top.values)
    return torch.cat([column.double() for column in columns], 1)
