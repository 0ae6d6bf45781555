"""A submitted request is split into one request per completion."""

from __future__ import annotations

import pytest

from kvscope_engine.submission import SubmissionLimits, child_requests
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

LIMITS = SubmissionLimits(max_model_len=100, max_pool_tokens=64)


def _submit(**options: object) -> Submit:
    return Submit(request_id="r", prompt="x", sampling=SamplingParams(**options))  # type: ignore[arg-type]


def test_each_completion_is_a_request_with_its_own_seed() -> None:
    requests = child_requests(_submit(n=3, seed=7), [1, 2], LIMITS, 5, engine_seed=0)
    assert [request.number for request in requests] == [5, 6, 7]
    assert [request.index for request in requests] == [0, 1, 2]
    assert [request.sampling.seed for request in requests] == [7, 8, 9]


def test_request_without_a_seed_gets_one_from_the_engine() -> None:
    first, again = (child_requests(_submit(), [1], LIMITS, 5, engine_seed=1)[0] for _ in range(2))
    other = child_requests(_submit(), [1], LIMITS, 6, engine_seed=1)[0]
    assert first.sampling.seed == again.sampling.seed != other.sampling.seed
    assert first.sampling.seed is not None


def test_largest_seed_wraps_within_its_range() -> None:
    requests = child_requests(_submit(n=2, seed=(1 << 63) - 1), [1], LIMITS, 1, engine_seed=0)
    assert [request.sampling.seed for request in requests] == [(1 << 63) - 1, -(1 << 63)]


@pytest.mark.parametrize(("asked", "resolved"), [(10, 10), (500, 98), (None, 62)])
def test_max_tokens_is_limited_by_the_model_and_by_default_by_the_pool(asked: int | None, resolved: int) -> None:
    (request,) = child_requests(_submit(max_tokens=asked), [1, 2], LIMITS, 1, engine_seed=0)
    assert request.max_tokens == resolved


def test_prompt_without_room_for_output_is_refused_with_the_numbers() -> None:
    with pytest.raises(BadInput, match=r"100 tokens: send at most 99"):
        child_requests(_submit(), [1] * 100, LIMITS, 1, engine_seed=0)
