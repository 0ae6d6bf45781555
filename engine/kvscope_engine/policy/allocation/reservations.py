"""How many tokens a request's space is reserved for: the rules in which the reserving policies differ."""

from __future__ import annotations

from typing import Protocol

from kvscope_engine.policy.request import Request
from kvscope_telemetry.errors import BadInput


class ReservationRule(Protocol):
    """Looks at a request only."""

    @property
    def name(self) -> str:
        """What `--allocator` calls the policy."""

    def num_tokens(self, request: Request) -> int:
        """Tokens, prompt and output together, to reserve for the request as it is now."""

    def check(self, request: Request) -> None:
        """Raise BadInput when the request lacks what the rule has to know."""


class ReserveMaximum:
    """As long as any request may get ("Orca (Max)")."""

    name = "contiguous"

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    def num_tokens(self, request: Request) -> int:
        """The limit of the model."""
        return self._max_model_len

    def check(self, request: Request) -> None:
        """It needs to know nothing."""


class ReservePowerOfTwo:
    """The prompt, and the output rounded up to a power of two: at most twice what it takes ("Orca (Pow2)").

    Who knows the output's length (`expected_tokens`) has that rounded, as in the paper: 32 for 25. Otherwise the
    output so far is, so that the reservation doubles each time the request outgrows it.
    """

    name = "buddy"

    def num_tokens(self, request: Request) -> int:
        """The prompt and a power of two."""
        expected = (request.expected_tokens or 0) - request.num_prompt_tokens
        output = max(expected, len(request.output_token_ids), 1)
        return request.num_prompt_tokens + (1 << (output - 1).bit_length())

    def check(self, request: Request) -> None:
        """Raise BadInput when it is expected to end where it cannot."""
        if request.expected_tokens is not None:
            _check_expected(request, request.expected_tokens)


class ReserveExactly:
    """What the request will take in the end ("Orca (Oracle)"): no system knows that, a simulator does."""

    name = "oracle"

    def num_tokens(self, request: Request) -> int:
        """The final length; that so far when the request outgrew what was expected."""
        return max(request.expected_tokens or 0, request.num_tokens)

    def check(self, request: Request) -> None:
        """Raise BadInput when the final length is missing, or cannot be."""
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
