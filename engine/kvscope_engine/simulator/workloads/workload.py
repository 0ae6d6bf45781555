"""Workload of a simulation: when each request arrives, how long it is, and which text it shares.

Values; knows neither their source (`generators`, `mooncake`, `azure`) nor how they are used.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request. `arrival_ns` counts from the start of the simulation."""

    arrival_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    text_ids: tuple[int, ...] = ()
    """Texts that the prompt starts with, numbered from 0; equal numbers are equal texts."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, at least one."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    tokens_per_text: int = 1
    """Length of the texts in tokens; a prompt that is shorter than its texts ends within the last of them."""

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(request.num_prompt_tokens + request.num_output_tokens for request in self.requests)

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean over all requests, including refused ones."""
        return sum(request.num_prompt_tokens for request in self.requests) / len(self.requests)

    @property
    def mean_output_tokens(self) -> float:
        """Mean over all requests, including refused ones."""
        return sum(request.num_output_tokens for request in self.requests) / len(self.requests)

    def prompt_token_ids(self, request: WorkloadRequest, own_token: int) -> list[int]:
        """Return the token ids of a prompt: each text repeats its number, the rest repeats `own_token` (below 0).

        So equal texts give equal tokens, and different texts differ in each token, whatever the block size.
        """
        tokens: list[int] = []
        for text_id in request.text_ids:
            tokens += [text_id] * self.tokens_per_text
        del tokens[request.num_prompt_tokens :]
        return tokens + [own_token] * (request.num_prompt_tokens - len(tokens))
