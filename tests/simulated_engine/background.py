"""Background requests of a simulated engine, and the numbers and tokens of all its requests.

Tokens come from a counter, so two texts are equal only if one request copies the beginning of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from tests.simulated_engine.hello import BLOCK_TOKENS

from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

PROMPT_TOKENS = range(8, 129)
OUTPUT_TOKENS = range(16, 257)
SHARED_PROMPTS = 0.7
"""Share of the prompts that begin like an earlier text."""
FORK_EVERY = 8
"""Number of prompts of which one has two completions."""
MAX_REMEMBERED_TEXTS = 64
MAX_REMEMBERED_TOKENS = 128
SAMPLING = ResolvedSampling(temperature=0.0, max_tokens=None, ignore_eos=True)


class BackgroundRequests:
    """Makes requests of a pool of `num_slots` tokens; each fits into a quarter of it."""

    def __init__(self, seed: int, num_slots: int) -> None:
        self.random = np.random.default_rng(seed)
        self._max_tokens = max(2, num_slots // 4 - 1)
        self._next_number = 1
        self._next_token = 0
        self._num_prompts = 0
        self._texts: deque[Sequence[int]] = deque(maxlen=MAX_REMEMBERED_TEXTS)

    def next_requests(self, now_ns: int) -> list[Request]:
        """Return the completions of the next prompt."""
        self._num_prompts += 1
        num_prompt = min(self._draw(PROMPT_TOKENS), self._max_tokens // 2)
        num_output = min(self._draw(OUTPUT_TOKENS), self._max_tokens - num_prompt)
        prompt = self._prompt(num_prompt)
        count = 1 + (self._num_prompts % FORK_EVERY == 0)
        first = self.take_numbers(count)
        name = f"simulated-{first}"
        parents = [0, *[first] * (count - 1)]
        return [
            new_request(first + index, name, prompt, num_output, now_ns, index=index, parent=parent)
            for index, parent in enumerate(parents)
        ]

    def remember(self, request: Request) -> None:
        """Let later prompts begin like the text of a request that ended."""
        self._texts.append(request.tokens(0, min(request.num_tokens, MAX_REMEMBERED_TOKENS)))

    def new_token(self) -> int:
        """Return an unused token."""
        self._next_token += 1
        return self._next_token

    def new_tokens(self, count: int) -> Sequence[int]:
        """Return `count` consecutive unused tokens."""
        self._next_token += count
        return range(self._next_token - count + 1, self._next_token + 1)

    def take_numbers(self, count: int) -> int:
        """Return the first of `count` unused request numbers."""
        first, self._next_number = self._next_number, self._next_number + count
        return first

    def _prompt(self, num_tokens: int) -> Sequence[int]:
        beginning: Sequence[int] = ()
        if self._texts and self.random.random() < SHARED_PROMPTS:
            text = self._texts[int(self.random.integers(len(self._texts)))]
            num_blocks = int(self.random.integers(0, (min(len(text), num_tokens - 1)) // BLOCK_TOKENS + 1))
            beginning = text[: num_blocks * BLOCK_TOKENS]
        return (*beginning, *self.new_tokens(num_tokens - len(beginning)))

    def _draw(self, numbers: range) -> int:
        return int(self.random.integers(numbers.start, numbers.stop))


def new_request(
    number: int,
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    now_ns: int,
    *,
    index: int = 0,
    parent: int = 0,
    client: str = "",
) -> Request:
    """Return a request that generates exactly `max_tokens` tokens."""
    return Request(
        number=number,
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SAMPLING,
        max_tokens=max_tokens,
        arrival_ns=now_ns,
        index=index,
        parent=parent,
        client=client,
    )
