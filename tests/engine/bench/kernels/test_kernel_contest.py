"""Kernel contests: participants and results. Nothing is timed; the samplers are fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_engine.bench.kernels.contest import (
    OURS,
    REFERENCE,
    Absent,
    BrokenDevice,
    CallCycle,
    Contest,
    measured,
)

ANSWER = torch.arange(6.0)


def contest(**others: Callable[[], Any]) -> Contest:
    calls = {OURS: lambda: ANSWER, **others}
    return Contest(
        kernel="k",
        case="c",
        num_bytes=4_000_000,
        flops=8_000_000,
        contenders={name: CallCycle([call]) for name, call in calls.items()},
        absent={"beforehand": "not installed"},
    )


def sampler(*seconds: float) -> Callable[[CallCycle], Callable[[], float]]:
    """Return a sampler factory that gives these times in the order of preparation."""
    times = iter(seconds)

    def prepare(contender: CallCycle) -> Callable[[], float]:
        found = next(times)
        return lambda: found

    return prepare


def test_kernel_benchmark_result_has_rates_and_ratios_to_other_libraries() -> None:
    both = contest(**{REFERENCE: lambda: ANSWER + 0.01})
    result = measured(both, sampler(1e-3, 4e-3), (lambda: 1e-3, 10_000_000), 3)
    ours, reference = result.rows
    assert (ours.contender, reference.contender) == (OURS, REFERENCE)
    assert ours.gb_per_s == pytest.approx(4.0)
    assert ours.share_of_read == pytest.approx(0.4)
    assert ours.tflop_per_s == pytest.approx(0.008)
    assert reference.ours_over_it == pytest.approx(4.0)
    assert result.read_gb_per_s == pytest.approx(10.0)
    assert result.absent == {"beforehand": "not installed"}


def raises() -> None:
    raise ValueError("no such head\nand more")


def refuses() -> None:
    raise Absent("another GPU")


def test_compared_library_that_fails_or_returns_wrong_results_is_listed_with_the_reason() -> None:
    given = contest(other=lambda: ANSWER + 1, shape=lambda: ANSWER[:3], fails=raises, refuses=refuses)
    result = measured(given, sampler(1.0), (lambda: 1.0, 1), 1)
    assert [row.contender for row in result.rows] == [OURS]
    assert result.absent == {
        "beforehand": "not installed",
        "other": "its result differs from ours",
        "shape": "its result differs from ours",
        "fails": "ValueError: no such head",
        "refuses": "another GPU",
    }


def test_failure_of_our_kernel_is_raised() -> None:
    given = contest()
    given.contenders[OURS] = CallCycle([raises])
    with pytest.raises(ValueError, match="no such head"):
        measured(given, sampler(), (lambda: 1.0, 1), 1)


def test_compared_library_that_cannot_be_prepared_is_left_out_with_the_reason() -> None:
    def prepare(contender: CallCycle) -> Callable[[], float]:
        if contender is given.contenders["late"]:
            raise RuntimeError("cannot be captured")
        return lambda: 1.0

    given = contest(late=lambda: ANSWER)
    result = measured(given, prepare, (lambda: 1.0, 1), 1)
    assert result.absent["late"] == "RuntimeError: cannot be captured"


def test_compared_library_that_breaks_the_device_is_named_in_the_error() -> None:
    """An error of the device is raised at synchronization, and from then on each time."""
    broken = [False]

    def failing_call() -> torch.Tensor:
        broken[0] = True
        return ANSWER

    def synchronize() -> None:
        if broken[0]:
            raise RuntimeError("an illegal memory access\nand more")

    named = "^theirs, k c: RuntimeError: an illegal memory access$"
    with pytest.raises(BrokenDevice, match=named):
        measured(
            contest(theirs=failing_call, others=lambda: ANSWER), sampler(1.0, 1.0), (lambda: 1.0, 1), 1, synchronize
        )
