"""How much each reserving policy asks for."""

from __future__ import annotations

import pytest

from kvscope_engine.policy.allocation.reservations import ReserveExactly, ReserveMaximum, ReservePowerOfTwo
from kvscope_engine.policy.request import Request
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.sampling_params import ResolvedSampling


def request_of(prompt: int, output: int = 0, expected: int | None = None, max_tokens: int = 100) -> Request:
    request = Request(1, "r", [0] * prompt, ResolvedSampling(), max_tokens, 0, expected_tokens=expected)
    request.output_token_ids += [0] * output
    return request


def test_maximum_policy_reserves_the_model_length() -> None:
    assert ReserveMaximum(2048).num_tokens(request_of(10, expected=12)) == 2048
    ReserveMaximum(2048).check(request_of(10))


@pytest.mark.parametrize(("output", "reserved"), [(1, 1), (2, 2), (3, 4), (25, 32), (32, 32), (33, 64)])
def test_known_output_is_rounded_up_to_a_power_of_two(output: int, reserved: int) -> None:
    assert ReservePowerOfTwo().num_tokens(request_of(100, expected=100 + output)) == 100 + reserved


@pytest.mark.parametrize(("output", "reserved"), [(0, 1), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16)])
def test_unknown_output_reservation_doubles(output: int, reserved: int) -> None:
    assert ReservePowerOfTwo().num_tokens(request_of(7, output)) == 7 + reserved


def test_buddy_reservation_doubles_when_output_exceeds_its_expected_length() -> None:
    assert ReservePowerOfTwo().num_tokens(request_of(7, output=9, expected=7 + 3)) == 7 + 16


def test_oracle_reserves_the_exact_length() -> None:
    assert ReserveExactly().num_tokens(request_of(7, output=2, expected=20)) == 20
    assert ReserveExactly().num_tokens(request_of(7, output=14, expected=20)) == 21


def test_oracle_refuses_an_unknown_length() -> None:
    with pytest.raises(BadInput, match="expected_tokens=None is not accepted with allocator='oracle'"):
        ReserveExactly().check(request_of(7))


@pytest.mark.parametrize("rule", [ReserveExactly(), ReservePowerOfTwo()])
@pytest.mark.parametrize("expected", [-1, 0, 6, 108])
def test_impossible_expected_length_is_refused(rule: ReserveExactly, expected: int) -> None:
    with pytest.raises(BadInput, match=rf"expected_tokens={expected} is not accepted: from 7 .* to 107"):
        rule.check(request_of(7, expected=expected))
    rule.check(request_of(7, expected=7))
    rule.check(request_of(7, expected=107))
