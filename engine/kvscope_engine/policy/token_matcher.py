"""What keeps a completion to the form that was asked for, as the engine sees it. Knows no grammar and no tensors."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenMatcher(Protocol):
    """Of one request. It follows the tokens that the request has, so neither preemption nor a batch can hurt it."""

    @property
    def is_ready(self) -> bool:
        """Whether it is known which tokens may come next: until then the request samples none."""

    def fill(self, words: NDArray[np.int32], row: int, *, may_end: bool) -> None:
        """Write into `words[row]` which tokens may come next: bit token % 32 of word token // 32.

        Changes nothing. Where it may not end yet, an end is allowed only when nothing else is.
        """

    def accept(self, token_id: int) -> None:
        """Go on by a token that was sampled. Raises KvscopeError for one that is not of the form."""

    @property
    def has_ended(self) -> bool:
        """Whether an end was accepted."""
