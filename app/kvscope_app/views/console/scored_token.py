"""Log-probabilities of an answer's tokens, as stored with the answer. Imports no Qt."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import msgspec

from kvscope_telemetry.messages.commands import Tokens

NUM_ALTERNATIVES: Final = 5
"""Number of most likely tokens that the console requests for each position."""
UNLIKELY_SHARE: Final = 0.1
"""Tokens with a smaller probability are underlined in the answer."""
_MIN_LOGPROB: Final = -100.0
"""Stored for smaller values and for those that JSON cannot represent. Its probability is shown as 0."""


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    """A generated token and its log-probability (natural logarithm) before sampling options are applied.

    Encoded as an array without names, because a long answer has thousands of them.
    """

    start: int
    """Offset of the token's text in the answer. The text ends where that of the next token starts."""
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    """Text and log-probability of the most likely tokens at this position, most likely first."""


def scored_tokens(reply: Tokens, start: int) -> list[ScoredToken]:
    """Return the tokens of `reply` for which it has log-probabilities. `start` is the offset of its text in the
    answer.
    """
    scored = []
    end = start + len(reply.text)
    for index, logprobs in enumerate(reply.logprobs):
        texts = reply.logprob_texts[index] if index < len(reply.logprob_texts) else ()
        own_text, *top_texts = texts or ("", *(f"token {token_id}" for token_id, _ in logprobs.top))
        if index == len(reply.logprobs) - 1 and own_text and reply.text.endswith(own_text):
            start = end - len(own_text)  # text before it was held back for a possible stop string
        top = tuple((text, _stored(logprob)) for text, (_, logprob) in zip(top_texts, logprobs.top, strict=False))
        scored.append(ScoredToken(start, _stored(logprobs.logprob), top))
        start = min(start + len(own_text), end)
    return scored


def token_at(tokens: Sequence[ScoredToken], offset: int, length: int) -> tuple[ScoredToken, int, int] | None:
    """Return the token at an offset in an answer of `length` characters, and the start and end of its text.

    None if the offset is before the first token or not in the answer.
    """
    index = bisect_right(tokens, offset, key=lambda token: token.start) - 1
    if index < 0 or offset >= length:
        return None
    end = tokens[index + 1].start if index + 1 < len(tokens) else length
    return tokens[index], tokens[index].start, end


def unlikely_ranges(tokens: Sequence[ScoredToken], length: int) -> list[tuple[int, int]]:
    """Return the start and end of the text of each unlikely token, in an answer of `length` characters."""
    ends = [token.start for token in tokens[1:]] + [length]
    return [
        (token.start, end)
        for token, end in zip(tokens, ends, strict=False)
        if end > token.start and probability(token.logprob) < UNLIKELY_SHARE
    ]


def probability(logprob: float) -> float:
    return math.exp(logprob) if logprob > _MIN_LOGPROB else 0.0


def _stored(logprob: float) -> float:
    return max(round(logprob, 3), _MIN_LOGPROB) if math.isfinite(logprob) else _MIN_LOGPROB
