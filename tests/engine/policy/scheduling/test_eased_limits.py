"""Limits of steps go down with the room that there was, and come back within a minute of calm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvscope_engine.policy.scheduling.eased_limits import CALM_NS, NEXT_NS, EasedLimits


class Limits(SimpleNamespace):
    """All that is asked of a scheduler."""

    max_num_batched_tokens = 8192
    max_num_seqs = 64

    eased: tuple[int, int] | None = None

    def set_limits(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens

    def ease(self, limits: tuple[int, int] | None) -> None:
        self.eased = limits

    @property
    def now(self) -> tuple[int, int]:
        num_tokens, num_seqs = self.eased or (1 << 30, 1 << 30)
        return min(self.max_num_batched_tokens, num_tokens), min(self.max_num_seqs, num_seqs)


@pytest.fixture
def limits() -> Any:
    return Limits()


@pytest.fixture
def eased(limits: Any) -> EasedLimits:
    return EasedLimits(limits)


def test_tokens_first_then_requests(limits: Any, eased: EasedLimits) -> None:
    assert eased.look(0) == ""
    assert eased.look(1, 1000) == "a step had no memory: steps have up to 1000 tokens of 64 requests for now"
    assert eased.look(2, 2000) == "", "it was planned before"
    assert eased.look(3, 40) == "a step had no memory: steps have up to 40 tokens of 40 requests for now"
    eased.look(4, 0)
    assert limits.now == (1, 1), "something may always run"
    assert eased.is_eased


def test_they_come_back_step_by_step_and_that_is_told_once(limits: Any, eased: EasedLimits) -> None:
    eased.look(0, 30)
    found, told = [], []
    for now_ns in range(0, 60_000_000_000, NEXT_NS):
        told.append(eased.look(now_ns))
        found.append(limits.now)
    assert found[: CALM_NS // NEXT_NS] == [(30, 30)] * (CALM_NS // NEXT_NS)
    assert found[CALM_NS // NEXT_NS :][:3] == [(60, 60), (120, 64), (240, 64)]
    assert limits.now == (8192, 64)
    assert [what for what in told if what] == ["steps have up to 8192 tokens of 64 requests again"]
    assert not eased.is_eased


def test_from_one_token_it_takes_a_minute_however_seldom_somebody_looks(limits: Any, eased: EasedLimits) -> None:
    eased.look(0, 1)
    assert "again" in eased.look(60_000_000_000)
    assert limits.now == (8192, 64)


def test_another_lack_begins_the_pause_anew(limits: Any, eased: EasedLimits) -> None:
    eased.look(0, 512)
    eased.look(CALM_NS)
    assert limits.now == (1024, 64)
    eased.look(CALM_NS + 1, 700)
    eased.look(2 * CALM_NS)
    assert limits.now == (700, 64)
    eased.look(2 * CALM_NS + 1)
    assert limits.now == (1400, 64)


def test_what_a_person_sets_meanwhile_holds(limits: Any, eased: EasedLimits) -> None:
    """Also where it is what steps have at that moment anyway."""
    eased.look(0, 30)
    limits.set_limits(30, 30)
    eased.look(1)
    assert limits.now == (30, 30)
    assert eased.look(90_000_000_000) == "steps have up to 30 tokens of 30 requests again"
    assert limits.now == (30, 30)
    assert not eased.is_eased
    assert eased.look(91_000_000_000, 1) == "a step had no memory: steps have up to 1 token of 1 request for now"
