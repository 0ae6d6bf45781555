"""Applies repetition, presence and frequency penalties to the logits of a batch.

Owns token counts per request, cached across steps. They are derived from a request's tokens, so preemption does not
invalidate them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.sampling_params import SamplingParams

MAX_CACHED_REQUESTS: Final = 64


@dataclass(frozen=True, slots=True)
class PenaltyInputs:
    """Tokens in the prompts and outputs of a batch, as indices into its logits."""

    flat_indices: torch.Tensor
    """Shape (n,), int64: flat indices, row * vocabulary + token, without duplicates."""
    output_counts: torch.Tensor
    """Shape (n,), float32: how often the request generated the token."""
    options: torch.Tensor
    """Shape (3, n), float32: repetition, presence and frequency penalty of the token's request."""


class Penalties:
    """Token counts of each penalized request."""

    def __init__(self) -> None:
        self._counts: dict[int, _TokenCounts] = {}

    def inputs(self, requests: Sequence[Request], vocab_size: int, buffer: StepBuffer) -> PenaltyInputs | None:
        """Write the penalized tokens to `buffer`. Returns None if no request has a penalty."""
        rows = [row for row, request in enumerate(requests) if request.is_penalized]
        if not rows:
            return None
        counts = [self._counts_of(requests[row]) for row in rows]
        sizes = [count.size for count in counts]
        indices, indices_tensor = buffer.reserve((sum(sizes),), np.int64)
        output_counts, counts_tensor = buffer.reserve((sum(sizes),), np.float32)
        np.concatenate([count.token_ids for count in counts], out=indices)
        np.concatenate([count.output_counts for count in counts], out=output_counts)
        indices += np.repeat(np.array(rows, np.int64) * vocab_size, sizes)
        options, options_tensor = buffer.reserve((3, sum(sizes)), np.float32)
        options[...] = np.repeat(_options(requests[row].sampling for row in rows), sizes, axis=1)
        self._forget_finished()
        return PenaltyInputs(indices_tensor, counts_tensor, options_tensor)

    def forget(self, request: Request) -> None:
        self._counts.pop(request.number, None)

    def _counts_of(self, request: Request) -> _TokenCounts:
        counts = self._counts.get(request.number)
        if counts is None:
            counts = self._counts[request.number] = _TokenCounts(request)
        counts.update()
        return counts

    def _forget_finished(self) -> None:
        if len(self._counts) > MAX_CACHED_REQUESTS:
            for number in [number for number, counts in self._counts.items() if counts.request.is_finished]:
                del self._counts[number]


class _TokenCounts:
    """Distinct tokens of a request, and the number of times that each was generated (0 for tokens only in the
    prompt)."""

    def __init__(self, request: Request) -> None:
        self.request = request
        prompt = sorted(set(request.prompt_token_ids))
        self._token_ids = np.array(prompt, np.int64)
        self._output_counts = np.zeros(len(prompt), np.float32)
        self._index = {token: index for index, token in enumerate(prompt)}
        self._num_counted = 0

    @property
    def size(self) -> int:
        return len(self._index)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        return self._token_ids[: self.size]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        return self._output_counts[: self.size]

    def update(self) -> None:
        for token in self.request.output_token_ids[self._num_counted :]:
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._token_ids):
                self._grow()
            self._token_ids[index] = token
            self._output_counts[index] += 1
        self._num_counted = len(self.request.output_token_ids)

    def _grow(self) -> None:
        added = max(64, len(self._token_ids))
        self._token_ids = np.concatenate((self._token_ids, np.zeros(added, np.int64)))
        self._output_counts = np.concatenate((self._output_counts, np.zeros(added, np.float32)))


def apply_penalties(logits: torch.Tensor, inputs: PenaltyInputs) -> None:
    """Apply penalties to `logits` (num_requests, vocabulary), float32, in place."""
    repetition, presence, frequency = inputs.options.unbind(0)
    flat = logits.view(-1)
    values = flat.index_select(0, inputs.flat_indices)
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat.index_copy_(
        0, inputs.flat_indices, values - frequency * inputs.output_counts - presence * (inputs.output_counts > 0)
    )


def _options(options: Iterable[SamplingParams]) -> NDArray[np.float32]:
    rows = [(o.repetition_penalty, o.presence_penalty, o.frequency_penalty) for o in options]
    return np.ascontiguousarray(np.array(rows, np.float32).T)
