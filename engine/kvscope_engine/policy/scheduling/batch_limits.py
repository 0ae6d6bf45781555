"""Limits of a step: configured limits, and temporary limits below them."""

from __future__ import annotations


class BatchLimits:
    """Maximum number of tokens and requests per step.

    A temporary limit, set by `reduce` or `cap_tokens`, applies in addition to the configured limits; the smallest
    counts.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        """Configured maximum number of requests per step. Change it and `max_num_batched_tokens` with `set`."""
        self.max_num_batched_tokens = max_num_batched_tokens
        self._reduced: tuple[int, int] | None = None
        self._token_cap: int | None = None

    def set(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Configure the limits for the following steps.

        If more requests run than the limit allows, they continue, and no others are admitted meanwhile.
        """
        assert min(max_num_seqs, max_num_batched_tokens) > 0, "a batch of nothing"
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens

    def reduce(self, limits: tuple[int, int] | None) -> None:
        """Temporarily lower the limits to (tokens, requests). None restores the limits set with `set`."""
        assert limits is None or min(limits) > 0, "a batch of nothing"
        self._reduced = limits

    def cap_tokens(self, max_tokens: int | None) -> None:
        """Limit the tokens of the following steps, independently of `reduce`; None removes this limit."""
        assert max_tokens is None or max_tokens > 0, "a batch of nothing"
        self._token_cap = max_tokens

    @property
    def max_step_tokens(self) -> int:
        limit = self.max_num_batched_tokens
        if self._reduced is not None:
            limit = min(limit, self._reduced[0])
        return limit if self._token_cap is None else min(limit, self._token_cap)

    @property
    def max_step_requests(self) -> int:
        return self.max_num_seqs if self._reduced is None else min(self.max_num_seqs, self._reduced[1])
