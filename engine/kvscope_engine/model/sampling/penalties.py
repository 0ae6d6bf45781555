"""Repetition, presence and frequency penalties over a batch, with what each request has said kept across steps.

Owns those counts: they follow from a request's tokens, so preemption cannot hurt them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.sampling_params import SamplingParams

MAX_IDLE: Final = 64


class Penalties:
    """Lowers the logits of tokens that were seen, row by row, where a request asks for it."""

    def __init__(self) -> None:
        self._counts: dict[int, _TokenCounts] = {}

    def apply(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """`logits` (num_requests, vocabulary), float32, changed in place."""
        rows = [row for row, request in enumerate(requests) if has_penalty(request.sampling)]
        if not rows:
            return
        counts = [self._counts_of(requests[row]) for row in rows]
        sizes = [count.size for count in counts]
        options = [requests[row].sampling for row in rows]
        where = (
            _tensor(np.repeat(rows, sizes), logits),
            _tensor(np.concatenate([count.token_ids for count in counts]), logits),
        )
        said = _tensor(np.concatenate([count.num_said for count in counts]), logits)
        repetition, presence, frequency = _each_token(options, sizes, logits)
        values = logits[where]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[where] = values - frequency * said - presence * (said > 0)
        self._forget_finished()

    def _counts_of(self, request: Request) -> _TokenCounts:
        counts = self._counts.get(request.number)
        if counts is None:
            counts = self._counts[request.number] = _TokenCounts(request)
        counts.update()
        return counts

    def _forget_finished(self) -> None:
        if len(self._counts) > MAX_IDLE:
            for number in [number for number, counts in self._counts.items() if counts.request.is_finished]:
                del self._counts[number]


class _TokenCounts:
    """The distinct tokens of a request, and how often each was generated (0: only in the prompt)."""

    def __init__(self, request: Request) -> None:
        self.request = request
        prompt = sorted(set(request.prompt_token_ids))
        self._token_ids = np.array(prompt, np.int64)
        self._num_said = np.zeros(len(prompt), np.float32)
        self._index = {token: index for index, token in enumerate(prompt)}
        self._num_counted = 0

    @property
    def size(self) -> int:
        return len(self._index)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        return self._token_ids[: self.size]

    @property
    def num_said(self) -> NDArray[np.float32]:
        return self._num_said[: self.size]

    def update(self) -> None:
        """Count the tokens generated since the last time."""
        for token in self.request.output_token_ids[self._num_counted :]:
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._token_ids):
                self._grow()
            self._token_ids[index] = token
            self._num_said[index] += 1
        self._num_counted = len(self.request.output_token_ids)

    def _grow(self) -> None:
        added = max(64, len(self._token_ids))
        self._token_ids = np.concatenate((self._token_ids, np.zeros(added, np.int64)))
        self._num_said = np.concatenate((self._num_said, np.zeros(added, np.float32)))


def has_penalty(sampling: SamplingParams) -> bool:
    """Whether any of the three is asked for."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def _each_token(
    options: Sequence[SamplingParams], sizes: Sequence[int], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = np.array([(o.repetition_penalty, o.presence_penalty, o.frequency_penalty) for o in options], np.float32)
    repetition, presence, frequency = _tensor(np.repeat(rows, sizes, axis=0), like).unbind(1)
    return repetition, presence, frequency


def _tensor(array: NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device)
