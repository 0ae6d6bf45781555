"""A step without memory: tried again, then without prefills; what is no shortage is raised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvscope_engine.policy.plan import Scheduled, StepPlan, StepResult
from kvscope_engine.policy.request import Request
from kvscope_engine.step_loop import run_with_shortages
from kvscope_telemetry.messages.sampling_params import ResolvedSampling


class Runner:
    """Fails with each of `errors` in turn."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.ran: list[StepPlan] = []
        self.num_recovered = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.ran.append(plan)
        if self.errors:
            raise self.errors.pop(0)
        return StepResult(tuple((1,) for _ in plan.scheduled))

    def launch(self, plan: StepPlan, after: Any = None) -> Any:
        raise AssertionError("nothing is launched here")

    def recover(self) -> None:
        self.num_recovered += 1


def make_plan(num_single_token: int, num_prefills: int) -> StepPlan:
    items = []
    for number in range(num_single_token + num_prefills):
        request = Request(number, f"r{number}", [1] * 9, ResolvedSampling(), 9, 0)
        items.append(Scheduled(request, 8, 1, True) if number < num_single_token else Scheduled(request, 0, 9, True))
    return StepPlan(tuple(items), num_single_token, ((1, 2),))


OUT = torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")


def test_a_step_is_tried_again() -> None:
    runner, plan = Runner(OUT), make_plan(2, 1)
    outcome = run_with_shortages(runner, plan)
    assert (outcome.plan, outcome.failed, runner.num_recovered) == (plan, (), 1)


def test_prefills_end_before_decodes_do() -> None:
    runner, plan = Runner(OUT, OUT), make_plan(2, 1)
    outcome = run_with_shortages(runner, plan)
    assert outcome.plan == StepPlan(plan.scheduled[:2], 2, plan.copies)
    assert [request.number for request in outcome.failed] == [2]
    assert outcome.reason == "no memory for a step of 11 tokens (CUDA out of memory. Tried)"


@pytest.mark.parametrize("sizes", [(2, 1), (2, 0), (0, 2)])
def test_all_of_the_step_end_when_nothing_helps(sizes: tuple[int, int]) -> None:
    runner, plan = Runner(OUT, OUT, OUT), make_plan(*sizes)
    outcome = run_with_shortages(runner, plan)
    assert outcome.plan.scheduled == ()
    assert len(outcome.failed) == len(plan.scheduled)
    assert runner.num_recovered == len(runner.ran) == (3 if all(sizes) else 2)


def test_what_changed_states_is_not_tried_again() -> None:
    runner, plan = Runner(OUT), make_plan(2, 1)
    plan.scheduled[0].request.state_slot = 3
    outcome = run_with_shortages(runner, plan)
    assert outcome.plan.scheduled == ()
    assert (len(outcome.failed), len(runner.ran)) == (3, 1)


def test_the_cause_and_what_would_help_are_told() -> None:
    runner, plan = Runner(OUT, OUT, OUT), make_plan(2, 1)
    outcome = run_with_shortages(runner, plan, lambda plan: f"give --max-num-batched-tokens {plan.num_tokens // 2}")
    assert outcome.reason == (
        "no memory for a step of 2 tokens (CUDA out of memory. Tried); give --max-num-batched-tokens 1"
    )


def test_a_report_that_fails_does_not_hide_the_shortage() -> None:
    def broken(plan: StepPlan) -> str:
        raise RuntimeError("the driver is gone")

    outcome = run_with_shortages(Runner(OUT, OUT), make_plan(2, 1), broken)
    assert outcome.reason.startswith("no memory for a step of 11 tokens")


def test_what_is_no_shortage_is_raised() -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        run_with_shortages(Runner(RuntimeError("an illegal memory access")), make_plan(1, 1))
