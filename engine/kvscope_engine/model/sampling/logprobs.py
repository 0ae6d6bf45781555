"""Log-probabilities of the model's own distribution: before temperature, penalties and filters, as vLLM gives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.commands import TokenLogprobs


class RawLogprobs:
    """Those of the rows that ask for them, taken from the logits before anything changes these."""

    def __init__(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        self._num_rows = len(requests)
        self._counts = {
            row: request.sampling.logprobs
            for row, request in enumerate(requests)
            if request.sampling.logprobs is not None
        }
        self._values: torch.Tensor | None = None
        if self._counts:
            self._values = logits[torch.tensor(list(self._counts), device=logits.device)].log_softmax(-1)

    def of(self, token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
        """One entry a row, None where none is asked for; empty when nobody asks."""
        if self._values is None:
            return []
        chosen = torch.tensor([token_ids[row] for row in self._counts], device=self._values.device)
        own: list[float] = self._values.gather(-1, chosen[:, None])[:, 0].tolist()
        found: list[TokenLogprobs | None] = [None] * self._num_rows
        for row, logprob, top in zip(self._counts, own, self._top(), strict=True):
            found[row] = TokenLogprobs(token_id=token_ids[row], logprob=logprob, top=top)
        return found

    def _top(self) -> list[tuple[tuple[int, float], ...]]:
        assert self._values is not None, "only called with values"
        counts = list(self._counts.values())
        largest = self._values.topk(min(max(counts), self._values.shape[1]))
        pairs = zip(largest.indices.tolist(), largest.values.tolist(), counts, strict=True)
        return [tuple(zip(ids[:count], values[:count], strict=True)) for ids, values, count in pairs]
