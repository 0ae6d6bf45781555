"""Step limits shrink to the tokens that had memory, and are restored within a minute without shortage."""

from __future__ import annotations

import pytest

from kvscope_engine.policy.scheduling.batch_limits import BatchLimits
from kvscope_engine.policy.scheduling.reduced_limits import DOUBLING_INTERVAL_NS, RECOVERY_DELAY_NS, ReducedLimits


def step_limits(limits: BatchLimits) -> tuple[int, int]:
    return limits.max_step_tokens, limits.max_step_requests


@pytest.fixture
def limits() -> BatchLimits:
    return BatchLimits(64, 8192)


@pytest.fixture
def reduced(limits: BatchLimits) -> ReducedLimits:
    return ReducedLimits(limits)


def test_step_without_memory_reduces_the_token_limit_first_and_then_the_request_limit(
    limits: BatchLimits, reduced: ReducedLimits
) -> None:
    assert reduced.update(0) == ""
    assert reduced.update(1, 1000) == "a step ran out of memory: steps have up to 1000 tokens of 64 requests for now"
    assert reduced.update(2, 2000) == "", "it was planned before"
    assert reduced.update(3, 40) == "a step ran out of memory: steps have up to 40 tokens of 40 requests for now"
    reduced.update(4, 0)
    assert step_limits(limits) == (1, 1), "something may always run"
    assert reduced.is_reduced


def test_reduced_step_limits_double_until_restored_and_that_is_reported_once(
    limits: BatchLimits, reduced: ReducedLimits
) -> None:
    reduced.update(0, 30)
    found, told = [], []
    for now_ns in range(0, 60_000_000_000, DOUBLING_INTERVAL_NS):
        told.append(reduced.update(now_ns))
        found.append(step_limits(limits))
    assert found[: RECOVERY_DELAY_NS // DOUBLING_INTERVAL_NS] == [(30, 30)] * (
        RECOVERY_DELAY_NS // DOUBLING_INTERVAL_NS
    )
    assert found[RECOVERY_DELAY_NS // DOUBLING_INTERVAL_NS :][:3] == [(60, 60), (120, 64), (240, 64)]
    assert step_limits(limits) == (8192, 64)
    assert [what for what in told if what] == ["steps have up to 8192 tokens of 64 requests again"]
    assert not reduced.is_reduced


def test_step_limits_reduced_to_one_token_are_restored_after_a_minute(
    limits: BatchLimits, reduced: ReducedLimits
) -> None:
    reduced.update(0, 1)
    assert "again" in reduced.update(60_000_000_000)
    assert step_limits(limits) == (8192, 64)


def test_another_memory_shortage_restarts_the_delay_before_step_limits_rise(
    limits: BatchLimits, reduced: ReducedLimits
) -> None:
    reduced.update(0, 512)
    reduced.update(RECOVERY_DELAY_NS)
    assert step_limits(limits) == (1024, 64)
    reduced.update(RECOVERY_DELAY_NS + 1, 700)
    reduced.update(2 * RECOVERY_DELAY_NS)
    assert step_limits(limits) == (700, 64)
    reduced.update(2 * RECOVERY_DELAY_NS + 1)
    assert step_limits(limits) == (1400, 64)


def test_step_limits_set_by_a_user_are_kept_when_reduced_limits_are_restored(
    limits: BatchLimits, reduced: ReducedLimits
) -> None:
    """A limit that a user sets is kept, even if it equals the reduced limit at that moment."""
    reduced.update(0, 30)
    limits.set(30, 30)
    reduced.update(1)
    assert step_limits(limits) == (30, 30)
    assert reduced.update(90_000_000_000) == "steps have up to 30 tokens of 30 requests again"
    assert step_limits(limits) == (30, 30)
    assert not reduced.is_reduced
    assert (
        reduced.update(91_000_000_000, 1) == "a step ran out of memory: steps have up to 1 token of 1 request for now"
    )
