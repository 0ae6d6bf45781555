"""Workload of a simulation: arrival, length and shared texts of each request. Independent of the source of the
workload.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request. `arrival_ns` is counted from the start of the simulation."""

    arrival_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    text_ids: tuple[int, ...] = ()
    """Numbers, from 0, of the texts at the start of the prompt. Equal numbers are equal texts."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, at least one."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    tokens_per_text: int = 1
    """Length of each text in tokens. A prompt that is shorter than its texts ends within the last of them."""

    @property
    def longest(self) -> int:
        """Number of tokens of the longest request, prompt and output."""
        return max(request.num_prompt_tokens + request.num_output_tokens for request in self.requests)

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean over all requests, including those that will be refused."""
        return sum(request.num_prompt_tokens for request in self.requests) / len(self.requests)

    @property
    def mean_output_tokens(self) -> float:
        return sum(request.num_output_tokens for request in self.requests) / len(self.requests)

    def prompt_token_ids(self, request: WorkloadRequest, own_token: int) -> list[int]:
        """Return the token ids of a prompt: each text is its number repeated, the remainder repeats `own_token` (below
        0).

        Equal texts thus give equal tokens, and different texts differ in each token, whatever the block size.
        """
        tokens: list[int] = []
        for text_id in request.text_ids:
            tokens += [text_id] * self.tokens_per_text
        del tokens[request.num_prompt_tokens :]
        return tokens + [own_token] * (request.num_prompt_tokens - len(tokens))
