"""Drafts of requests: tokens that may follow, which the model checks several in one pass.

Keeps each request's tokens as an array, appended to as they come, until it ends. Knows no blocks and no budget.
Requests whose next token depends on what was sampled (forms, penalties) get none: how a draft's later tokens are
sampled is not known until the earlier ones are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.policy.plan import StepPlan
from kvscope_engine.policy.request import Request
from kvscope_telemetry.engine_config import SpeculativeConfig

MIN_ROOM = 256
"""Tokens that a request's array has room for behind its prompt, at first."""


class Drafter:
    """Guesses by n-grams."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._texts: dict[int, _Text] = {}

    @property
    def most(self) -> int:
        """Tokens of a draft."""
        return self._config.num_speculative_tokens

    def draft(self, request: Request, count: int | None = None) -> tuple[int, ...]:
        """Tokens that may follow those known, at most `count`, and never past an end by length."""
        if request.follows_its_tokens:
            return ()
        most = min(self.most, request.max_tokens - len(request.output_token_ids) - 1)
        most = most if count is None else min(most, count)
        return tuple(self._guess(request, most)) if most > 0 else ()

    def is_wanted_after(self, plan: StepPlan) -> bool:
        """Whether the step after this one, which is in flight, is better planned once its tokens are known.

        They must be where drafts are among them; elsewhere they should be where a draft would have followed the tokens
        before them: it probably does now.
        """
        return any(item.drafts or (item.samples and self.draft(item.request)) for item in plan.scheduled)

    def forget(self, request: Request) -> None:
        """It ended."""
        self._texts.pop(request.number, None)

    def _guess(self, request: Request, most: int) -> list[int]:
        text = self._texts.get(request.number)
        if text is None:
            text = self._texts[request.number] = _Text(request)
        return find_draft(text.tokens(), most, self._config.shortest, self._config.longest)


class _Text:
    """A request's tokens, prompt and output, in one array that grows."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._size = request.num_prompt_tokens
        self._array = np.empty(self._size + MIN_ROOM, np.int32)
        self._array[: self._size] = request.prompt_token_ids

    def tokens(self) -> NDArray[np.int32]:
        """All that are known by now."""
        size, known = self._request.num_tokens, self._size
        if size > len(self._array):
            grown = np.empty(2 * size, np.int32)
            grown[:known] = self._array[:known]
            self._array = grown
        self._array[known:size] = self._request.tokens(known, size)
        self._size = size
        return self._array[:size]


def find_draft(tokens: NDArray[np.int32], count: int, shortest: int, longest: int) -> list[int]:
    """What may follow a text, by what followed its last tokens when they were there before. Arithmetic on token ids.

    Of the matches the longest is taken, of those of its length the first in the text, as vLLM does: it has most
    behind it.

    Up to `count` tokens to follow `tokens`; none where their last `shortest` were not there before.

    One pass over the tokens, and one over the places left for each token more that matches.
    """
    size = len(tokens)
    if size <= shortest or count < 1:
        return []
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    found = -1
    for length in range(1, longest + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == tokens[size - length]]
        if not len(ends):
            break
        if length >= shortest:
            found = int(ends[0])
    draft: list[int] = tokens[found + 1 : found + 1 + count].tolist() if found >= 0 else []
    return draft
