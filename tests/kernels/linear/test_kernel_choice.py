"""The choice between kernels and torch for few rows takes the faster, measured with a fake clock."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvscope_kernels.linear import choice
from kvscope_kernels.linear.choice import times_against_torch
from kvscope_kernels.linear.skinny_linear import ALWAYS, NEVER, FewRows, linear_torch

WEIGHTS = [torch.ones(8, 64, dtype=torch.bfloat16) for _ in range(3)]


def fake_kernel(*args: Any) -> torch.Tensor:
    """Compute with torch, in place of the kernels, which need a GPU."""
    return linear_torch(*args)


def fake_clock(one: float, several: float) -> Callable[[Sequence[Any]], Callable[[], float]]:
    """Return a clock with these times of the kernels for one row and for several; torch takes 1."""

    def prepared(calls: Sequence[Any]) -> Callable[[], float]:
        assert len(calls) == len(WEIGHTS), "each weight in turn, as the layers of a step"
        rows = len(calls[0].args[0])
        return lambda: (one if rows == 1 else several) if calls[0].func is fake_kernel else 1.0

    return prepared


@pytest.mark.parametrize(
    ("one", "several", "taken"),
    [
        (0.9, 0.8, ALWAYS),
        (0.9, 1.1, FewRows(single=True, several=False)),
        (1.2, 0.9, FewRows(single=False, several=True)),
        (0.98, 0.98, NEVER),  # a gain of 2 % is within the noise
    ],
)
def test_faster_of_kernel_and_torch_is_chosen_for_products_of_few_rows(
    one: float, several: float, taken: FewRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "linear", fake_kernel)
    found = times_against_torch(WEIGHTS, torch.bfloat16, fake_clock(one, several))
    assert found == pytest.approx((one, several))
    assert found.few_rows == taken


def test_random_numbers_of_the_user_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "linear", fake_kernel)
    before = torch.get_rng_state()
    times_against_torch(WEIGHTS, torch.bfloat16, fake_clock(1.0, 1.0))
    assert torch.equal(torch.get_rng_state(), before)


def test_failing_or_wrong_kernels_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    for product in (broken, lambda *args: fake_kernel(*args) + 1000.0):
        monkeypatch.setattr(choice, "linear", product)
        assert times_against_torch(WEIGHTS, torch.bfloat16, fake_clock(0.1, 0.1)).few_rows == NEVER
