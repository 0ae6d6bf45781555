"""Workload of a simulation: arrival, length and shared prefixes of each request, whatever their source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Measured times of a recorded request in seconds, without the engine's stops; None if unknown."""

    ttft_s: float | None
    tpot_s: float | None
    """Mean time per output token after the first."""
    ended_s: float | None
    """Time of the end, since the first arrival of the workload; None if the request had not ended."""
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request. `arrival_ns` is the time since the start of the simulation."""

    arrival_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    text_ids: tuple[int, ...] = ()
    """Ids (from 0) of the equally long texts (`Workload.tokens_per_text`) with which the prompt starts, in
    order. Requests with equal ids have equal texts, which they can share as a prefix.
    """
    client: str = ""
    """Client that sent the request; "" if unknown. Scheduling is fair between clients."""
    priority: int = 0
    request_id: str = ""
    """Identifier that the completions of one prompt share. If "", the request is the only completion of its prompt."""
    index: int = 0
    """Index among the completions of one prompt. All but the first wait for the prompt and share its blocks."""
    drafts: tuple[tuple[int, int, int], ...] = ()
    """Recorded speculation: (number of output tokens before the step, drafts verified, drafts accepted)."""
    measured: MeasuredTimes | None = None
    """Times measured when the request was recorded; None if the workload is no recording."""


@dataclass(frozen=True, slots=True)
class Workload:
    """At least one request, in order of arrival."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    tokens_per_text: int = 1
    """Length in tokens of each text in `WorkloadRequest.text_ids`. If a prompt is shorter than its texts
    together, it ends within the last one.
    """

    @property
    def longest(self) -> int:
        """Number of tokens (prompt and output) of the longest request."""
        return max(request.num_prompt_tokens + request.num_output_tokens for request in self.requests)

    @property
    def is_in_order(self) -> bool:
        """Whether waiting requests are scheduled in the order of arrival, since no rule of priority or fairness
        applies.
        """
        return not any(request.client or request.priority or request.request_id for request in self.requests)

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean number of prompt tokens over all requests, including those that will be refused."""
        return sum(request.num_prompt_tokens for request in self.requests) / len(self.requests)

    @property
    def mean_output_tokens(self) -> float:
        return sum(request.num_output_tokens for request in self.requests) / len(self.requests)

    def prompt_token_ids(self, request: WorkloadRequest, own_token: int) -> list[int]:
        """Return the token ids of a request's prompt: each text is its id repeated `tokens_per_text` times, and the
        rest of the prompt repeats `own_token` (below 0).

        Equal texts thus give equal tokens, and different texts differ in each token, whatever the block size.
        """
        tokens: list[int] = []
        for text_id in request.text_ids:
            tokens += [text_id] * self.tokens_per_text
        del tokens[request.num_prompt_tokens :]
        return tokens + [own_token] * (request.num_prompt_tokens - len(tokens))
