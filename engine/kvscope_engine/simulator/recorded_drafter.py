"""Drafter that repeats the speculation of a recording: same positions, same number of drafts, same acceptance.

Drafts depend only on the text of their request, so they are the same in a simulation with other settings.
"""

from __future__ import annotations

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.spec_decode.drafter import Drafter
from kvscope_engine.policy.step_plan import StepPlan
from kvscope_engine.simulator.workloads.workload import Workload
from kvscope_telemetry.engine_config import SpeculativeConfig


class RecordedDrafter(Drafter):
    """Drafts for the requests of `workload`, which are numbered from 1 in its order."""

    def __init__(self, workload: Workload, max_draft_tokens: int) -> None:
        super().__init__(SpeculativeConfig(num_speculative_tokens=max_draft_tokens))
        self._drafts = {
            (number, num_output_tokens): (num_drafts, num_accepted)
            for number, request in enumerate(workload.requests, 1)
            for num_output_tokens, num_drafts, num_accepted in request.drafts
        }

    def draft(self, request: Request, count: int | None = None) -> tuple[int, ...]:
        num_output_tokens = len(request.output_token_ids)
        num_drafts, _ = self._drafts.get((request.number, num_output_tokens), (0, 0))
        limit = min(num_drafts, self.max_draft_tokens, request.max_tokens - num_output_tokens - 1)
        return (-request.number,) * max(0, limit if count is None else min(limit, count))

    def num_accepted(self, request: Request, num_drafts: int) -> int:
        """Return how many of `num_drafts` drafts after the request's tokens are accepted."""
        return min(num_drafts, self._drafts.get((request.number, len(request.output_token_ids)), (0, 0))[1])

    def needs_tokens_of(self, plan: StepPlan) -> bool:
        return True

    def remove_request(self, request: Request) -> None:
        pass


def recorded_drafter(workload: Workload) -> RecordedDrafter | None:
    """Return the drafter for a workload; None if no speculation was recorded."""
    most = max((num_drafts for request in workload.requests for _, num_drafts, _ in request.drafts), default=0)
    return RecordedDrafter(workload, most) if most else None
