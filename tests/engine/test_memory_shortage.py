"""A step without memory, or in which a library fails, is retried, then split; a lost device ends the engine."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StateSave, StepPlan, StepResult
from kvscope_engine.step_loop import run_with_retries
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.sampling_params import ResolvedSampling


class FailingRunner:
    """A runner that fails with each of `errors` in turn."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.ran: list[StepPlan] = []
        self.num_recovered = 0
        self.computes = True

    def run(self, plan: StepPlan) -> StepResult:
        self.ran.append(plan)
        if self.errors:
            raise self.errors.pop(0)
        return StepResult(tuple((1,) for _ in plan.scheduled))

    def launch(self, plan: StepPlan, after: Any = None) -> Any:
        raise AssertionError("nothing is launched here")

    def is_device_usable(self) -> bool:
        return self.computes

    def recover(self) -> None:
        self.num_recovered += 1

    def release_graphs(self) -> bool:
        return False


def make_plan(num_single_token: int, num_prefills: int) -> StepPlan:
    items = []
    for number in range(num_single_token + num_prefills):
        request = Request(number, f"r{number}", [1] * 9, ResolvedSampling(), 9, 0)
        items.append(Scheduled(request, 8, 1, True) if number < num_single_token else Scheduled(request, 0, 9, True))
    return StepPlan(tuple(items), num_single_token, ((1, 2),))


OUT = torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")


def test_failed_step_is_retried() -> None:
    runner, plan = FailingRunner(OUT), make_plan(2, 1)
    outcome = run_with_retries(runner, plan)
    assert (outcome.plan, outcome.failed, runner.num_recovered) == (plan, (), 1)


class SmallRunner(FailingRunner):
    """A runner with memory for steps of `most` tokens; one request is too large at any size."""

    def __init__(self, most: int, too_much: int | None = None, has_graphs: bool = False) -> None:
        super().__init__()
        self.most, self.too_much, self.has_graphs = most, too_much, has_graphs

    def run(self, plan: StepPlan) -> StepResult:
        numbers = [item.request.number for item in plan.scheduled]
        assert plan.num_single_token == sum(item.num_tokens == 1 for item in plan.scheduled)
        if plan.num_tokens > self.most or self.too_much in numbers:
            raise RuntimeError("CUDA error: out of memory")
        self.ran.append(plan)
        said = tuple((number,) if item.samples else () for number, item in zip(numbers, plan.scheduled, strict=True))
        return StepResult(said, logit_sums=tuple(tuple(1000 + token for token in tokens) for tokens in said))

    def release_graphs(self) -> bool:
        had, self.has_graphs = self.has_graphs, False
        self.most += 100 * had
        return had


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: cuBLAS")])
def test_tensors_of_a_failed_step_are_freed_before_memory_is_released(error: Exception) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    class Holding(FailingRunner):
        def run(self, plan: StepPlan) -> StepResult:
            activations = torch.zeros(1)
            held.append(weakref.ref(activations))
            if len(held) < 3:
                raise error
            return super().run(plan)

        def recover(self) -> None:
            assert held[-1]() is None
            super().recover()

    runner = Holding()
    run_with_retries(runner, make_plan(2, 1))
    assert runner.num_recovered == 2


def test_memory_of_graphs_is_released_before_a_step_is_split() -> None:
    runner, plan = SmallRunner(2, has_graphs=True), make_plan(2, 1)
    assert run_with_retries(runner, plan).plan == plan
    assert runner.ran == [plan]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 10])
def test_split_step_computes_every_token_once_and_ends_no_request(most: int) -> None:
    """Tokens are in order, copies come before all parts, and each token belongs to its item."""
    runner, plan = SmallRunner(most), make_plan(3, 2)
    outcome = run_with_retries(runner, plan)
    assert outcome.failed == ()
    assert outcome.reasons == ()
    assert outcome.plan == plan
    assert outcome.result.token_ids == ((0,), (1,), (2,), (3,), (4,))
    assert outcome.result.logit_sums == ((1000,), (1001,), (1002,), (1003,), (1004,))
    assert [part.copies for part in runner.ran] == [plan.copies] + [()] * (len(runner.ran) - 1)
    for item in plan.scheduled:
        pieces = [each for part in runner.ran for each in part.scheduled if each.request is item.request]
        computed = [position for each in pieces for position in range(each.start, each.start + each.num_tokens)]
        assert computed == list(range(item.start, item.start + item.num_tokens))
        assert [each.samples for each in pieces] == [False] * (len(pieces) - 1) + [True]


def test_step_without_memory_drops_draft_tokens_before_it_fails_a_request() -> None:
    runner, plan = SmallRunner(1), make_plan(1, 0)
    drafted = plan.scheduled[0]._replace(num_tokens=3, drafts=(8, 9))
    other = make_plan(2, 0).scheduled[1]
    outcome = run_with_retries(runner, StepPlan((other, drafted), 1))
    assert outcome.plan == StepPlan((other, plan.scheduled[0]), 2)
    assert outcome.result.token_ids == ((1,), (0,))


@pytest.mark.parametrize("too_much", [0, 1, 2, 3])
def test_only_a_request_that_cannot_run_alone_ends(too_much: int) -> None:
    runner, plan = SmallRunner(99, too_much), make_plan(2, 2)
    outcome = run_with_retries(runner, plan)
    assert [request.number for request in outcome.failed] == [too_much]
    assert outcome.reasons == ("no memory for a step of 1 token (CUDA error: out of memory)",)
    assert [item.request.number for item in outcome.plan.scheduled] == [n for n in range(4) if n != too_much]
    assert outcome.plan.num_single_token == 2 - (too_much < 2)


@pytest.mark.parametrize("sizes", [(2, 1), (2, 0), (0, 2)])
def test_all_requests_of_the_step_end_if_nothing_helps(sizes: tuple[int, int]) -> None:
    runner, plan = SmallRunner(0), make_plan(*sizes)
    outcome = run_with_retries(runner, plan)
    assert outcome.plan.scheduled == ()
    assert len(outcome.failed) == len(plan.scheduled)
    assert runner.num_recovered <= 2 + 5 * len(plan.scheduled)


def test_step_that_changed_states_is_not_retried() -> None:
    runner, plan = FailingRunner(OUT), make_plan(2, 1)
    plan.scheduled[0].request.state_slot = 3
    outcome = run_with_retries(runner, plan)
    assert outcome.plan.scheduled == ()
    assert (len(outcome.failed), len(runner.ran)) == (3, 1)


def test_request_that_fails_for_lack_of_memory_names_cause_and_advice() -> None:
    plan = make_plan(2, 1)
    asked: list[StepPlan] = []

    def explain(plan: StepPlan) -> str:
        asked.append(plan)
        return "give less"

    outcome = run_with_retries(SmallRunner(0), plan, explain)
    assert set(outcome.reasons) == {"no memory for a step of 1 token (CUDA error: out of memory); give less"}
    assert asked == [plan], "more than one call: it may ask the driver, and no request is served meanwhile"


def test_each_failed_request_gets_its_own_reason() -> None:
    """A library cannot run one of the requests, and there is no memory for another."""

    class Both(SmallRunner):
        def run(self, plan: StepPlan) -> StepResult:
            if 0 in (item.request.number for item in plan.scheduled):
                raise LIBRARY
            return super().run(plan)

    outcome = run_with_retries(Both(99, too_much=2), make_plan(2, 1))
    assert [request.number for request in outcome.failed] == [0, 2]
    assert "CUBLAS" in outcome.reasons[0]
    assert outcome.reasons[1].startswith("no memory for a step of 1 token ")


def test_failed_explanation_does_not_hide_the_shortage() -> None:
    def broken(plan: StepPlan) -> str:
        raise RuntimeError("the driver is gone")

    outcome = run_with_retries(SmallRunner(0), make_plan(1, 0), broken)
    assert outcome.reasons[0].startswith("no memory for a step of 1 token ")


LIBRARY = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`")


def test_step_with_a_failed_library_is_retried() -> None:
    runner, plan = FailingRunner(LIBRARY), make_plan(2, 1)
    outcome = run_with_retries(runner, plan)
    assert (outcome.plan, outcome.failed, outcome.error, outcome.fitting_tokens) == (plan, (), LIBRARY, None)


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_only_a_request_that_makes_a_library_fail_ends(bad: int) -> None:
    class Picky(SmallRunner):
        def run(self, plan: StepPlan) -> StepResult:
            if bad in (item.request.number for item in plan.scheduled):
                raise LIBRARY
            return super().run(plan)

    outcome = run_with_retries(Picky(99), make_plan(2, 2))
    assert [request.number for request in outcome.failed] == [bad]
    assert outcome.reasons == (f"a step of 1 token failed ({LIBRARY})",)
    assert outcome.fitting_tokens is None, "a library failure was taken for a shortage"


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), LIBRARY], ids=["lost", "same"])
def test_lost_device_raises_the_original_error(error: RuntimeError) -> None:
    runner = FailingRunner(error)
    runner.computes = False
    with pytest.raises(RuntimeError) as raised:
        run_with_retries(runner, make_plan(1, 1))
    assert raised.value is error
    assert len(runner.ran) == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), KvscopeError("rank 1 failed: can't allocate memory")])
def test_unrelated_errors_are_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_with_retries(FailingRunner(error), make_plan(1, 1))


def test_state_saves_of_a_failed_step_are_dropped() -> None:
    plan = make_plan(2, 1)
    for item in plan.scheduled:
        item.request.state_slot = item.request.number
    plan = replace(plan, state_saves=(StateSave(plan.scheduled[0].request, 16, 7),))
    assert run_with_retries(FailingRunner(), plan).plan.state_saves == plan.state_saves
    assert run_with_retries(FailingRunner(OUT), plan).plan.state_saves == ()


@pytest.mark.parametrize(("most", "room"), [(1, 1), (2, 2), (5, 5), (9, 9), (99, None)])
def test_step_split_for_lack_of_memory_reports_how_many_tokens_fit(most: int, room: int | None) -> None:
    assert run_with_retries(SmallRunner(most), make_plan(3, 2)).fitting_tokens == room


def test_number_of_fitting_tokens_is_unknown_if_one_token_fails_or_a_retry_succeeds() -> None:
    assert run_with_retries(SmallRunner(0), make_plan(3, 2)).fitting_tokens is None
    outcome = run_with_retries(FailingRunner(OUT, OUT), make_plan(1, 0))
    assert (outcome.failed, outcome.fitting_tokens) == ((), None)


def test_failed_step_that_cannot_be_split_reports_that_half_of_its_tokens_fit() -> None:
    plan = make_plan(3, 2)
    plan.scheduled[0].request.state_slot = 3
    assert run_with_retries(SmallRunner(0), plan).fitting_tokens == 10
