"""Rules that compute how many tokens are reserved for a request. The policies that reserve blocks differ only
in this rule.
"""

from __future__ import annotations

from typing import Protocol

from kvscope_engine.policy.request import Request
from kvscope_telemetry.errors import BadInput


class ReservationRule(Protocol):
    """Computes the size of a reservation from a request alone."""

    @property
    def name(self) -> str:
        """Name of the policy that uses the rule, as the option `--allocator` accepts it."""

    def num_tokens(self, request: Request) -> int:
        """Return the number of tokens, prompt and output, to reserve for the request in its current state."""

    def check(self, request: Request) -> None:
        """Raise BadInput if the request lacks a value that the rule needs."""


class ReserveMaximum:
    """Reserves the maximum length of any request ("Orca (Max)" in the PagedAttention paper)."""

    name = "contiguous"

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    def num_tokens(self, request: Request) -> int:
        return self._max_model_len

    def check(self, request: Request) -> None: ...


class ReservePowerOfTwo:
    """Reserves the prompt, and the output rounded up to a power of two ("Orca (Pow2)" in the PagedAttention paper).

    If the output's length is known (`expected_tokens`), that length is rounded, as in the paper: 25 to 32. Otherwise
    the current length is rounded, so that the reservation doubles each time the output outgrows it.
    """

    name = "buddy"

    def num_tokens(self, request: Request) -> int:
        expected = (request.expected_tokens or 0) - request.num_prompt_tokens
        output = max(expected, len(request.output_token_ids), 1)
        return request.num_prompt_tokens + (1 << (output - 1).bit_length())

    def check(self, request: Request) -> None:
        if request.expected_tokens is not None:
            _check_expected(request, request.expected_tokens)


class ReserveExactly:
    """Reserves the final length of the request ("Orca (Oracle)" in the PagedAttention paper), which only a
    simulator knows.
    """

    name = "oracle"

    def num_tokens(self, request: Request) -> int:
        """Return the final length, or the current length if the request outgrew its `expected_tokens`."""
        return max(request.expected_tokens or 0, request.num_tokens)

    def check(self, request: Request) -> None:
        """Raise BadInput if the final length is missing or out of range."""
        if request.expected_tokens is None:
            raise BadInput(
                "expected_tokens=None is not accepted with allocator='oracle': the request's final length,"
                " which only a simulator knows"
            )
        _check_expected(request, request.expected_tokens)


def _check_expected(request: Request, expected: int) -> None:
    low, high = request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens
    if not low <= expected <= high:
        raise BadInput(
            f"expected_tokens={expected} is not accepted: from {low} (the prompt) to {high} (and all new tokens)"
        )
