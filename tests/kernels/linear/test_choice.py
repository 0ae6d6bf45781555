"""Whether kernels or torch multiply few rows: what is faster, by a clock that is made up."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvscope_kernels.linear import choice
from kvscope_kernels.linear.choice import times_against_torch
from kvscope_kernels.linear.skinny_linear import ALWAYS, NEVER, FewRows, linear_torch

WEIGHTS = [torch.ones(8, 64, dtype=torch.bfloat16) for _ in range(3)]


def ours(*args: Any) -> torch.Tensor:
    """In the place of the kernels, which a test without a GPU has not."""
    return linear_torch(*args)


def clock(one: float, several: float) -> Callable[[Sequence[Any]], Callable[[], float]]:
    """The kernels take so long for one row and for several; torch takes 1."""

    def prepared(calls: Sequence[Any]) -> Callable[[], float]:
        assert len(calls) == len(WEIGHTS), "each weight in turn, as the layers of a step"
        rows = len(calls[0].args[0])
        return lambda: (one if rows == 1 else several) if calls[0].func is ours else 1.0

    return prepared


@pytest.mark.parametrize(
    ("one", "several", "taken"),
    [
        (0.9, 0.8, ALWAYS),
        (0.9, 1.1, FewRows(single=True, several=False)),
        (1.2, 0.9, FewRows(single=False, several=True)),
        (0.98, 0.98, NEVER),  # a gain of 2 % is timing's own noise
    ],
)
def test_the_faster_is_taken(one: float, several: float, taken: FewRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "linear", ours)
    found = times_against_torch(WEIGHTS, torch.bfloat16, clock(one, several))
    assert found == pytest.approx((one, several))
    assert found.few_rows == taken


def test_the_users_random_numbers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "linear", ours)
    before = torch.get_rng_state()
    times_against_torch(WEIGHTS, torch.bfloat16, clock(1.0, 1.0))
    assert torch.equal(torch.get_rng_state(), before)


def test_kernels_that_fail_or_compute_something_else_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    for product in (broken, lambda *args: ours(*args) + 1000.0):
        monkeypatch.setattr(choice, "linear", product)
        assert times_against_torch(WEIGHTS, torch.bfloat16, clock(0.1, 0.1)).few_rows == NEVER
