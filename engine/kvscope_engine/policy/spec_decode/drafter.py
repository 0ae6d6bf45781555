"""Drafts several tokens of a request, which the model verifies in one pass.

Owns a growing array of each request's tokens until the request ends. Independent of blocks and budget. Requests whose
next token depends on the previous ones (structured output, penalties) get no drafts: the sampling of later draft tokens
depends on the values of earlier ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import StepPlan
from kvscope_telemetry.engine_config import SpeculativeConfig

MIN_OUTPUT_CAPACITY = 256
"""Initial capacity of a request's array, in tokens after its prompt."""


class Drafter:
    """Drafts tokens by n-gram lookup in the request's own text."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._texts: dict[int, _Text] = {}

    @property
    def max_draft_tokens(self) -> int:
        return self._config.num_speculative_tokens

    def draft(self, request: Request, count: int | None = None) -> tuple[int, ...]:
        """Return tokens that may follow the known tokens, at most `count`, and never beyond `max_tokens`."""
        if request.depends_on_tokens:
            return ()
        limit = min(self.max_draft_tokens, request.max_tokens - len(request.output_token_ids) - 1)
        limit = limit if count is None else min(limit, count)
        return tuple(self._guess(request, limit)) if limit > 0 else ()

    def needs_tokens_of(self, plan: StepPlan) -> bool:
        """Whether to plan the next step only when the tokens of `plan`, the step in flight, are known.

        This is required if `plan` contains drafts. Otherwise it is preferable if the tokens before those in flight had
        a draft, because then there probably is a draft now.
        """
        return any(item.drafts or (item.samples and self.draft(item.request)) for item in plan.scheduled)

    def remove_request(self, request: Request) -> None:
        self._texts.pop(request.number, None)

    def _guess(self, request: Request, limit: int) -> list[int]:
        text = self._texts.get(request.number)
        if text is None:
            text = self._texts[request.number] = _Text(request)
        return find_draft(text.tokens(), limit, self._config.shortest, self._config.longest)


class _Text:
    def __init__(self, request: Request) -> None:
        self._request = request
        self._size = request.num_prompt_tokens
        self._array = np.empty(self._size + MIN_OUTPUT_CAPACITY, np.int32)
        self._array[: self._size] = request.prompt_token_ids

    def tokens(self) -> NDArray[np.int32]:
        size, known = self._request.num_tokens, self._size
        if size > len(self._array):
            grown = np.empty(2 * size, np.int32)
            grown[:known] = self._array[:known]
            self._array = grown
        self._array[known:size] = self._request.tokens(known, size)
        self._size = size
        return self._array[:size]


def find_draft(tokens: NDArray[np.int32], count: int, shortest: int, longest: int) -> list[int]:
    """Return up to `count` tokens that followed an earlier occurrence of the last tokens of a text.

    The longest match of `shortest` to `longest` tokens is used. Of several matches of this length, the first in the
    text is used, as in vLLM, because the most tokens follow it. The list is empty if the last `shortest` tokens did not
    occur before. Costs one pass over `tokens`, and one over the remaining matches for each further token of the match.
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
