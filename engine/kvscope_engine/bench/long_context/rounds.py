"""Rounds of decoding for a batch of requests that each have a long context in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from kvscope_engine.bench.measure import Rate, interleaved_samples, timed, with_prefix

MAX_ROUNDS: Final = 24


@dataclass(frozen=True, slots=True)
class LongBatch:
    """Size of a batch of requests with equally long contexts that decode together."""

    num_requests: int = 8
    context_tokens: int = 4096
    round_tokens: int = 16
    """Number of tokens generated per request in one round."""

    @property
    def name(self) -> str:
        return f"{self.num_requests} at {self.context_tokens:,}"

    @property
    def length(self) -> int:
        """Upper bound of a request's number of tokens after all rounds, with a margin."""
        return self.context_tokens + self.round_tokens * (MAX_ROUNDS + 2)


class LongContender(Protocol):
    """Contender that decodes after long contexts. Each request has its own copy of the keys and values."""

    name: str

    def fill(self, prompt: Sequence[int]) -> None:
        """Start all requests with `prompt`, and generate the first token of each."""

    def decode(self, num_tokens: int) -> None: ...


def long_rates(
    contenders: Sequence[LongContender],
    batch: LongBatch,
    text_ids: Sequence[int],
    repeats: int,
    show_progress: Callable[[str], None],
) -> dict[str, list[Rate]]:
    """Return the decode rate of each contender in each round, without the time to fill the contexts.

    Within a round, contenders run one after the other.
    """
    prompt = [text_ids[index % len(text_ids)] for index in range(batch.context_tokens)]
    for contender in contenders:
        show_progress(f"{batch.name}: {contender.name} fills")
        contender.fill(prompt)
        contender.decode(batch.round_tokens)
    num_tokens = batch.num_requests * batch.round_tokens
    samplers = {each.name: partial(timed, partial(each.decode, batch.round_tokens), num_tokens) for each in contenders}
    return interleaved_samples(samplers, min(repeats, MAX_ROUNDS), with_prefix(batch.name, show_progress))
