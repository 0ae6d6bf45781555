"""What may follow a text, by what followed its last tokens when they were there before. Arithmetic on token ids.

Of the matches the longest is taken, of those of its length the first in the text, as vLLM does: it has most behind it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def find_draft(tokens: NDArray[np.int32], count: int, shortest: int, longest: int) -> list[int]:
    """Up to `count` tokens to follow `tokens`; none where their last `shortest` were not there before.

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
