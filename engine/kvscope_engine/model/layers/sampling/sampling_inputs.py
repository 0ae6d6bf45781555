"""Builds the inputs of sampling from the requests on the host and sends them to the device with the step.

Decides which sampling operations each row needs. All branches of sampling depend on these inputs, never on data
computed on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.layers.sampling.logit_bias import BiasInputs, LogitBiases
from kvscope_engine.model.layers.sampling.penalties import Penalties, PenaltyInputs
from kvscope_engine.policy.request import Request
from kvscope_kernels.logits.allow_tokens import WORD_BITS
from kvscope_kernels.logits.random_numbers import keys

MIN_TEMPERATURE: Final = 1e-5
"""Temperature below which sampling is greedy, as in vLLM: dividing by less would overflow."""


@dataclass(frozen=True, slots=True)
class LogprobInputs:
    """Batch rows with requested log-probabilities, and the number of top tokens of each."""

    rows: list[int]
    counts: list[int]
    row_indices: torch.Tensor
    """The indices in `rows` as a tensor on the device, shape (len(rows),), int64."""


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """Batch rows that are sampled at random, not greedily."""

    rows: torch.Tensor
    """Shape (n,), int64, ascending."""
    options: torch.Tensor
    """Shape (n, 4), float64: temperature, top-k, top-p and min-p."""
    keys: torch.Tensor
    """Shape (n,), int64: key of each row's random number generator, from the request's seed and its number of output
    tokens.
    """


@dataclass(frozen=True, slots=True)
class GrammarInputs:
    """Batch rows with structured output, and the tokens allowed in each."""

    rows: torch.Tensor
    """Shape (n,), int64."""
    allowed: torch.Tensor
    """Shape (n, words), int32, one bit per token."""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling options of a batch as tensors; None for operations that no request needs."""

    num_rows: int
    vocab_size: int
    """Number of columns of the logits."""
    biases: BiasInputs | None
    penalties: PenaltyInputs | None
    forbidden: torch.Tensor | None
    """Flat indices, row * vocabulary + token, of tokens that would end a completion too early."""
    grammars: GrammarInputs | None
    draw: DrawInputs | None
    logprobs: LogprobInputs | None


def sampling_inputs(
    requests: Sequence[Request],
    num_output_tokens: Sequence[int],
    eos_token_ids: Sequence[int],
    vocab_size: int,
    penalties: Penalties,
    biases: LogitBiases,
    buffer: StepBuffer,
) -> SamplingInputs:
    """Write all inputs to `buffer`, which the caller sends to the device.

    `num_output_tokens`: number of output tokens that precede the sampled one, for each request. If a request's next
    token depends on its previous one (`Request.depends_on_tokens`), the previous one must be known on the host, or the
    request must have finished. A request whose grammar is not ready is not constrained.
    """
    early = _early_ends(requests, num_output_tokens, eos_token_ids, vocab_size)
    drawn = [row for row, request in enumerate(requests) if request.sampling.temperature >= MIN_TEMPERATURE]
    return SamplingInputs(
        num_rows=len(requests),
        vocab_size=vocab_size,
        biases=biases.inputs(requests, vocab_size, buffer),
        penalties=penalties.inputs(requests, vocab_size, buffer),
        forbidden=buffer.put(np.array(early, np.int64)) if early else None,
        grammars=_grammar_inputs(requests, num_output_tokens, vocab_size, buffer),
        draw=_draw_inputs(requests, num_output_tokens, drawn, buffer) if drawn else None,
        logprobs=_logprob_inputs(requests, buffer),
    )


def _draw_inputs(
    requests: Sequence[Request], num_output_tokens: Sequence[int], rows: list[int], buffer: StepBuffer
) -> DrawInputs:
    drawn = [requests[row] for row in rows]
    options = [(s.temperature, max(s.top_k, 0), s.top_p, s.min_p) for s in (request.sampling for request in drawn)]
    seeds = [request.number if request.sampling.seed is None else request.sampling.seed for request in drawn]
    return DrawInputs(
        rows=buffer.put(np.array(rows, np.int64)),
        options=buffer.put(np.array(options, np.float64)),
        keys=buffer.put(keys(seeds, [num_output_tokens[row] for row in rows])),
    )


def _logprob_inputs(requests: Sequence[Request], buffer: StepBuffer) -> LogprobInputs | None:
    num_top = {row: r.sampling.logprobs for row, r in enumerate(requests) if r.sampling.logprobs is not None}
    if not num_top:
        return None
    rows = list(num_top)
    return LogprobInputs(rows, list(num_top.values()), buffer.put(np.array(rows, np.int64)))


def _grammar_inputs(
    requests: Sequence[Request], num_output_tokens: Sequence[int], vocab_size: int, buffer: StepBuffer
) -> GrammarInputs | None:
    rows = [row for row, r in enumerate(requests) if r.matcher is not None and r.matcher.is_ready]
    if not rows:
        return None
    words, allowed = buffer.reserve((len(rows), -(-vocab_size // WORD_BITS)), np.int32)
    for index, row in enumerate(rows):
        matcher = requests[row].matcher
        assert matcher is not None
        matcher.fill(words, index, may_end=not _is_early(requests[row], num_output_tokens[row]))
    return GrammarInputs(buffer.put(np.array(rows, np.int64)), allowed)


def _early_ends(
    requests: Sequence[Request], num_output_tokens: Sequence[int], eos_token_ids: Sequence[int], vocab_size: int
) -> list[int]:
    """Return flat indices of the tokens that would end a completion with fewer than `min_tokens` tokens, and must not
    be sampled.

    Rows with structured output are left out, because their grammar matcher excludes these tokens.
    """
    flat_indices: list[int] = []
    for row, request in enumerate(requests):
        if request.matcher is None and _is_early(request, num_output_tokens[row]):
            ends = {*eos_token_ids, *request.sampling.stop_token_ids}
            flat_indices += [row * vocab_size + token for token in sorted(ends)]
    return flat_indices


def _is_early(request: Request, num_output_tokens: int) -> bool:
    return num_output_tokens < request.sampling.min_tokens
