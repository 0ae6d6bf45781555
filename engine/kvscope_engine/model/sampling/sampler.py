"""From logits to tokens, for a whole batch at once.

Owns the order of sampling: penalties, temperature, filters, one random number a row. A request's token depends on
its own logits, options, seed and position, never on the rest of the batch. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from kvscope_engine.model.sampling.logprobs import RawLogprobs
from kvscope_engine.model.sampling.penalties import Penalties, has_penalty
from kvscope_engine.model.sampling.random_numbers import uniforms
from kvscope_engine.model.sampling.token_draw import draw
from kvscope_engine.model.sampling.token_filter import has_filter, thresholds
from kvscope_engine.model.sampling.vocabulary_pieces import first_largest
from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.commands import TokenLogprobs
from kvscope_telemetry.messages.sampling_params import SamplingParams

MIN_TEMPERATURE: Final = 1e-5
"""Below it the most likely token is taken, as vLLM does: dividing by less overflows."""


class Sampler:
    """Samples one token for each row of logits. Keeps only what penalties have counted."""

    def __init__(self, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        self._eos = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._penalties = Penalties()

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """logits (num_requests, vocabulary) -> a token a request, and log-probabilities: empty when none are asked.

        `logits` may be changed.
        """
        logits = logits.float()
        raw = RawLogprobs(logits, requests)
        self._adjust(logits, requests)
        drawn = [row for row, request in enumerate(requests) if not _is_greedy(request.sampling)]
        tokens = _draw(logits, requests) if len(drawn) == len(requests) else first_largest(logits)
        if 0 < len(drawn) < len(requests):
            where = torch.tensor(drawn, device=logits.device)
            tokens[where] = _draw(logits.index_select(0, where), [requests[row] for row in drawn])
        token_ids: list[int] = tokens.tolist()
        return token_ids, raw.of(token_ids)

    def _adjust(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """Penalties, and no end of sequence before `min_tokens`; in place."""
        if any(has_penalty(request.sampling) for request in requests):
            self._penalties.apply(logits, requests)
        early = [row for row, request in enumerate(requests) if _is_early(request)]
        if early and self._eos:
            rows = torch.tensor(early, device=logits.device)
            logits[rows[:, None], torch.tensor(self._eos, device=logits.device)] = -torch.inf


def _draw(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """(n, vocabulary) -> (n,), at the requests' temperatures, filtered, with their own random numbers."""
    options = [request.sampling for request in requests]
    scaled = logits.div_(torch.tensor([option.temperature for option in options], device=logits.device)[:, None])
    numbers = torch.from_numpy(uniforms(*_seeds_and_positions(requests))).to(logits.device)
    return draw(_weights(scaled, options), numbers)


def _weights(scaled: torch.Tensor, options: Sequence[SamplingParams]) -> torch.Tensor:
    """Unnormalised probabilities; zero for what is filtered out."""
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    if any(has_filter(option) for option in options):
        weights.mul_(scaled >= thresholds(scaled, weights, options)[:, None])
    return weights


def _seeds_and_positions(requests: Sequence[Request]) -> tuple[list[int], list[int]]:
    """The engine gives every request that draws a seed; its number stands in where none was given."""
    seeds = [r.number if r.sampling.seed is None else r.sampling.seed for r in requests]
    return seeds, [len(request.output_token_ids) for request in requests]


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < MIN_TEMPERATURE


def _is_early(request: Request) -> bool:
    return len(request.output_token_ids) < request.sampling.min_tokens
