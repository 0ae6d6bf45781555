"""Plans of steps whose requests are there for the step alone."""

from __future__ import annotations

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_telemetry.messages.sampling_params import ResolvedSampling


def scheduled(number: int, num_cached: int, num_tokens: int, *, state_slot: int = -1) -> Scheduled:
    """The last `num_tokens` of a prompt, of which `num_cached` are computed; a token is sampled after them."""
    request = Request(
        number=number,
        request_id=f"r{number}",
        prompt_token_ids=[7] * (num_cached + num_tokens),
        sampling=ResolvedSampling(temperature=0.0),
        max_tokens=9,
        arrival_ns=0,
        output_token_ids=[],
        block_tables=(list(range((num_cached + num_tokens) // 16 + 2)),),
        state_slot=state_slot,
    )
    return Scheduled(request, num_cached, num_tokens, True)


def decodes(count: int) -> StepPlan:
    """So many requests of a token each, behind some thirty."""
    return StepPlan(tuple(scheduled(number, 30 + number, 1) for number in range(count)), count)
