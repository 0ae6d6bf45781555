"""Adds requests' logit biases to the logits of a batch.

Owns each request's biases as arrays, cached across steps. They are derived from the request's options, so preemption
does not invalidate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.policy.request import Request

MAX_CACHED_REQUESTS: Final = 64


@dataclass(frozen=True, slots=True)
class BiasInputs:
    """Biased tokens of a batch, as indices into its logits."""

    flat_indices: torch.Tensor
    """Shape (n,), int64: flat indices, row * vocabulary + token, without duplicates."""
    biases: torch.Tensor
    """Shape (n,), float32."""


@dataclass(frozen=True, slots=True)
class _Biased:
    request: Request
    token_ids: NDArray[np.int64]
    biases: NDArray[np.float32]


class LogitBiases:
    def __init__(self) -> None:
        self._biases: dict[int, _Biased] = {}

    def inputs(self, requests: Sequence[Request], vocab_size: int, buffer: StepBuffer) -> BiasInputs | None:
        """Write the biases to `buffer`. Returns None if no request has any."""
        rows = [row for row, request in enumerate(requests) if request.sampling.logit_bias]
        if not rows:
            return None
        request_biases = [self._biased(requests[row]) for row in rows]
        sizes = [len(biased.token_ids) for biased in request_biases]
        indices, indices_tensor = buffer.reserve((sum(sizes),), np.int64)
        biases, biases_tensor = buffer.reserve((sum(sizes),), np.float32)
        np.concatenate([biased.token_ids for biased in request_biases], out=indices)
        np.concatenate([biased.biases for biased in request_biases], out=biases)
        indices += np.repeat(np.array(rows, np.int64) * vocab_size, sizes)
        self._forget_finished()
        return BiasInputs(indices_tensor, biases_tensor)

    def forget(self, request: Request) -> None:
        self._biases.pop(request.number, None)

    def _biased(self, request: Request) -> _Biased:
        biased = self._biases.get(request.number)
        if biased is None:
            bias = request.sampling.logit_bias
            token_ids = np.fromiter(bias.keys(), np.int64, len(bias))
            biases = np.fromiter(bias.values(), np.float32, len(bias))
            biased = self._biases[request.number] = _Biased(request, token_ids, biases)
        return biased

    def _forget_finished(self) -> None:
        if len(self._biases) > MAX_CACHED_REQUESTS:
            for number in [number for number, biased in self._biases.items() if biased.request.is_finished]:
                del self._biases[number]


def apply_biases(logits: torch.Tensor, inputs: BiasInputs) -> None:
    """Add biases to `logits` (num_requests, vocabulary), float32, in place."""
    logits.view(-1).index_add_(0, inputs.flat_indices, inputs.biases)
