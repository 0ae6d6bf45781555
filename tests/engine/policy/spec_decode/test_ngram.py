"""N-gram drafts: what followed the same tokens before."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvscope_engine.policy.spec_decode.drafter import find_draft


def expected_draft(tokens: list[int], count: int, shortest: int, longest: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                return tokens[end : end + count]
    return []


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),  # tokens after the match, up to the end
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], [3, 9, 1]),  # the first of those alike
        ([1, 2, 5, 7, 1, 2, 6, 7, 1, 2], [6, 7, 1]),  # the longest, though later
        ([5, 5, 5], [5]),
        ([1, 2, 3], []),
        ([2, 1, 2], []),  # one equal token is too few
        ([], []),
    ],
)
def test_ngram_draft_is_what_followed_the_longest_match(tokens: list[int], found: list[int]) -> None:
    assert find_draft(np.array(tokens, np.int32), 3, 2, 3) == found


def test_ngram_drafts_of_random_texts_equal_those_of_a_plain_search() -> None:
    generator = random.Random(1)
    for _ in range(500):
        tokens = generator.choices(range(generator.randint(1, 6)), k=generator.randint(0, 30))
        shortest = generator.randint(1, 4)
        longest = generator.randint(shortest, 6)
        count = generator.randint(0, 5)
        wanted = expected_draft(tokens, count, shortest, longest)
        assert find_draft(np.array(tokens, np.int32), count, shortest, longest) == wanted, (tokens, shortest, longest)
