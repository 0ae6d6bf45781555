"""Finds prompts that differ early and are equal again afterwards, such as those with a time in the system prompt.

Prefix caching ends at the difference, so that all that follows is computed again. Each prompt is compared with the one
before it in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

MIN_EQUAL_TOKENS: Final = 64
"""Number of equal tokens after a difference from which it is reported."""
_WINDOW: Final = 16
"""Number of equal consecutive tokens that end a difference."""
_MAX_DIFFERENCE: Final = 64
"""Maximum length of a difference in tokens."""


@dataclass(frozen=True, slots=True)
class EarlyDifference:
    start: int
    """Position of the first token that differs."""
    end: int
    """Position in the second prompt from which the tokens are equal again."""
    earlier_end: int
    """The same in the first prompt."""
    num_equal: int
    """Number of equal tokens from there."""


def early_difference(earlier: Sequence[int], prompt: Sequence[int]) -> EarlyDifference | None:
    """Return where two prompts differ, if at least `MIN_EQUAL_TOKENS` equal tokens follow the difference."""
    start = _num_equal(earlier, prompt)
    windows = {
        tuple(earlier[at : at + _WINDOW]): at
        for at in range(min(start + _MAX_DIFFERENCE, len(earlier) - _WINDOW), start - 1, -1)
    }
    best: EarlyDifference | None = None
    for at in range(start, min(start + _MAX_DIFFERENCE, len(prompt) - _WINDOW) + 1):
        earlier_at = windows.get(tuple(prompt[at : at + _WINDOW]))
        if earlier_at is not None:
            num_equal = _num_equal(earlier[earlier_at:], prompt[at:])
            best = EarlyDifference(start, at, earlier_at, num_equal)
            break
    return best if best is not None and best.num_equal >= MIN_EQUAL_TOKENS else None


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    length = min(len(first), len(second))
    differs = np.array(first[:length]) != np.array(second[:length])
    return int(differs.argmax()) if differs.any() else length
