"""Building the plan of a step."""

from __future__ import annotations

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.plan_builder import PlanBuilder
from kvscope_telemetry.messages.sampling_params import ResolvedSampling


def make_request(number: int) -> Request:
    return Request(number, f"r{number}", [1] * 9, ResolvedSampling(), 1, 0)


def test_single_token_decodes_come_before_prompt_chunks_in_a_step() -> None:
    draft = PlanBuilder(20, 0)
    chunk, single = make_request(1), make_request(2)
    draft.add(chunk, 0, 5, False)
    draft.add(single, 0, 1, True)
    plan = draft.plan()
    assert [item.request for item in plan.scheduled] == [single, chunk]
    assert (plan.num_single_token, plan.num_tokens, draft.budget) == (1, 6, 14)


def test_dropped_request_leaves_nothing_in_the_plan() -> None:
    draft = PlanBuilder(20, 0)
    stays, goes = make_request(1), make_request(2)
    for request, count in ((stays, 1), (goes, 4)):
        draft.add(request, 0, count, True)
        draft.copy(request, request.number, request.number + 10)
    draft.drop(goes)
    plan = draft.plan()
    assert [item.request for item in plan.scheduled] == [stays]
    assert plan.copies == ((1, 11),)
    assert draft.budget == 19


def test_planned_block_copy_can_be_undone_by_its_source_block() -> None:
    draft = PlanBuilder(20, 0)
    one, other = make_request(1), make_request(2)
    draft.copy(one, 5, 15)
    draft.copy(other, 6, 16)
    assert draft.undo_copy_from(7) is None
    assert draft.undo_copy_from(6) == (other, 16)
    assert draft.undo_copy_from(6) is None
    assert draft.plan().copies == ((5, 15),)
