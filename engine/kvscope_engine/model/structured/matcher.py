"""One completion's way through its form, by XGrammar's matcher."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvscope_telemetry.errors import KvscopeError

WORD_BITS = 32


class FormMatcher:
    """A `TokenMatcher`. `compiled` is shared by all completions of the form, the way through it is this one's own."""

    def __init__(self, compiled: Any, ends: Collection[int], within: NDArray[np.int32] | None = None) -> None:
        """`within` is a mask of the only tokens that may ever come; None: all."""
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not ends)
        self._ends = tuple(ends)
        self._within = within
        self._is_stuck = False

    def can_begin(self, words: NDArray[np.int32]) -> bool:
        """Whether any token can be the first; `words` is a row of a mask to work in."""
        self.fill(words, 0, may_end=True)
        return not self._is_stuck

    def fill(self, words: NDArray[np.int32], row: int, *, may_end: bool) -> None:
        """Write which tokens may come next."""
        words[row] = -1  # what is not written when everything may
        self._matcher.fill_next_token_bitmask(words, row)
        mask = words[row]
        if self._within is not None:
            mask &= self._within
        if not may_end:
            self._keep_from_ending(mask)
        self._is_stuck = not mask.any()
        if self._is_stuck:
            mask[:] = -1  # a row without any token is no distribution; `accept` ends the request

    def accept(self, token_id: int) -> None:
        """Go on by a token that was sampled."""
        if self._is_stuck:
            raise KvscopeError("no token of this model goes on in the form that was asked for")
        if not self._matcher.accept_token(token_id):
            raise KvscopeError(f"token {token_id} was sampled, which is not of the form that was asked for")

    @property
    def has_ended(self) -> bool:
        """Whether an end was accepted; of a model that knows none, whether the text is whole."""
        return bool(self._matcher.is_terminated())

    def _keep_from_ending(self, mask: NDArray[np.int32]) -> None:
        """No end may be sampled, unless the form allows nothing else."""
        open_mask = mask.copy()
        for token in self._ends:
            open_mask.view(np.uint32)[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
        if open_mask.any():
            mask[:] = open_mask
