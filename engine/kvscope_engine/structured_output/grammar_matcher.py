"""A compiled grammar, and the matching state of each completion, as received from the grammar's process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.structured_output import grammar_messages
from kvscope_engine.structured_output.grammar_messages import WORD_BITS, TrialResult
from kvscope_engine.structured_output.grammar_process import MAX_SILENCE_S, GrammarProcess, wait_for_any
from kvscope_telemetry.errors import KvscopeError


class Grammar:
    """A grammar that was compiled and accepted. Its process ends when the last reference to this object is dropped."""

    def __init__(self, process: GrammarProcess, trial_result: TrialResult, ends: Collection[int]) -> None:
        self.process = process
        self.ends = ends
        self.first_mask = np.frombuffer(trial_result.mask, np.int32)
        self.num_bytes = process.own_bytes
        """Memory of the grammar's process in bytes, when it was last measured."""
        weakref.finalize(self, process.kill)

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self)


class GrammarMatcher:
    """Implements `TokenMatcher` for one completion. `StructuredOutputManager.request_masks` requests the mask
    after each token.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._mask: NDArray[np.int32] | None = grammar.first_mask
        """Mask of the allowed next tokens; None while it is being computed."""
        self._is_stuck = False
        """Whether no token can continue the text. The mask is then meaningless."""
        self._has_ended = False
        self._number = grammar.process.add_completion(self)

    @property
    def is_ready(self) -> bool:
        """Whether `fill` does not have to wait. Also True if the grammar's process failed; `accept` then raises
        an error.
        """
        return self._mask is not None or self._has_ended or bool(self._grammar.process.failure)

    def fill(self, words: NDArray[np.int32], row: int, *, may_end: bool) -> None:
        """Write the bit mask of the allowed next tokens to `words[row]`, after waiting for it if necessary.

        Without `may_end`, end-of-sequence tokens are not allowed, unless nothing else is.
        """
        mask = self._await_mask()
        if mask is None or self._is_stuck:
            words[row] = -1  # a row without any token is not a distribution; `accept` ends the request
            return
        words[row] = mask
        if not may_end:
            self._disallow_end(words[row])

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token. Raises KvscopeError if the grammar does not allow it, or if the grammar's
        process failed.
        """
        mask = self._await_mask()
        if mask is None:
            raise KvscopeError(self._grammar.process.failure or "its structured output has ended")
        if self._is_stuck:
            raise KvscopeError("no token of this model can continue the text by the requested grammar")
        if not int(mask[token_id // WORD_BITS]) >> token_id % WORD_BITS & 1:
            raise KvscopeError(f"token {token_id} was sampled, which the requested grammar does not allow")
        self._mask = None
        if token_id in self._grammar.ends:
            self._has_ended = True
        else:
            self._grammar.process.accept(self._number, token_id)

    @property
    def has_ended(self) -> bool:
        """Whether an end-of-sequence token was accepted or, for a model without one, whether the text is complete."""
        if not self._grammar.ends:
            self._await_mask()
        return self._has_ended

    def receive_mask(self, state: int, mask: NDArray[np.int32]) -> None:
        self._has_ended = state == grammar_messages.ENDED
        self._is_stuck = state != grammar_messages.CONTINUES
        self._mask = mask

    def _await_mask(self) -> NDArray[np.int32] | None:
        """Wait for the mask and return it; None if the process failed, did not answer in time, or the text ended."""
        if self._mask is not None:
            return self._mask
        process, deadline_s = self._grammar.process, time.monotonic() + MAX_SILENCE_S
        while not self.is_ready and time.monotonic() < deadline_s:
            if not process.receive():
                wait_for_any([process], 0.1)
        return self._mask

    def _disallow_end(self, mask: NDArray[np.int32]) -> None:
        """Remove end-of-sequence tokens from the mask, unless it allows nothing else."""
        open_mask = mask.copy()
        for token in self._grammar.ends:
            open_mask.view(np.uint32)[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
        if open_mask.any():
            mask[:] = open_mask
