"""Contenders that hold a batch of long contexts and go on with all of them, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from kvscope_engine.bench.measure import Rate, in_turns, telling_of, timed

MOST_ROUNDS: Final = 24


@dataclass(frozen=True, slots=True)
class LongBatch:
    """Requests with as long a context each, which go on together."""

    num_requests: int = 8
    context_tokens: int = 4096
    round_tokens: int = 16
    """Of each request, in a round."""

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{self.num_requests} at {self.context_tokens:,}"

    @property
    def length(self) -> int:
        """Tokens of a request when all rounds are over, with room to spare."""
        return self.context_tokens + self.round_tokens * (MOST_ROUNDS + 2)


class LongContender(Protocol):
    """Something that decodes behind contexts of its own memory each: none of them shares keys and values."""

    name: str

    def fill(self, prompt: Sequence[int]) -> None:
        """All requests with this prompt, and a first token after each."""

    def decode(self, num_tokens: int) -> None:
        """So many more tokens of each."""


def long_rates(
    contenders: Sequence[LongContender],
    batch: LongBatch,
    text_ids: Sequence[int],
    repeats: int,
    tell: Callable[[str], None],
) -> dict[str, list[Rate]]:
    """Each contender's rate in each round, one after the other within a round; filling is not measured."""
    prompt = [text_ids[place % len(text_ids)] for place in range(batch.context_tokens)]
    for contender in contenders:
        tell(f"{batch.name}: {contender.name} fills")
        contender.fill(prompt)
        contender.decode(batch.round_tokens)
    num_tokens = batch.num_requests * batch.round_tokens
    samplers = {each.name: partial(timed, partial(each.decode, batch.round_tokens), num_tokens) for each in contenders}
    return in_turns(samplers, min(repeats, MOST_ROUNDS), telling_of(batch.name, tell))
