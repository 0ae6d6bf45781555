"""Draft tokens in a step: how many each request gets, and which are accepted after the step.

Drafts are added to a plan last, so that no other request lacks blocks or budget because of them. Owns the list of
requests that may hold blocks for drafts until the step is committed; `BlockTables` writes the block tables.
"""

from __future__ import annotations

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduler_totals import SchedulerTotals
from kvscope_engine.policy.scheduling.block_tables import BlockTables
from kvscope_engine.policy.scheduling.plan_builder import PlanBuilder
from kvscope_engine.policy.spec_decode.drafter import Drafter
from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_telemetry.messages.request_state import RequestState


class Drafting:
    def __init__(self, drafter: Drafter, tables: BlockTables) -> None:
        self.drafter = drafter
        self._tables = tables
        self._drafted: list[Request] = []
        """Requests whose block tables may extend past their computed tokens."""

    def add_drafts(self, plan: PlanBuilder, step: int, max_sampled: int) -> None:
        """Add drafts to the plan's decodes, so that the step samples at most `max_sampled` tokens.

        The limit is higher if a single request with all its drafts samples more tokens than that. Memory is always
        allocated for this number.
        """
        remaining = max(max_sampled, 1 + self.drafter.max_draft_tokens) - plan.num_sampled

        def propose(item: Scheduled, budget: int) -> tuple[int, ...]:
            nonlocal remaining
            request = item.request
            if not item.samples or item.start < request.num_prompt_tokens:
                return ()
            drafts = self.drafter.draft(request, min(budget, remaining))
            drafts = drafts[: self._allocate_draft_blocks(request, item.start + 1, len(drafts), step, plan)]
            remaining -= len(drafts)
            return drafts

        if remaining > 0:
            plan.draft(propose)

    def commit(self, plan: StepPlan, step: int, totals: SchedulerTotals) -> None:
        """Free the blocks of rejected drafts and count accepted ones. Call it after `plan` is committed."""
        for item in plan.scheduled[plan.num_single_token :]:
            if item.drafts:
                num_accepted = item.num_tokens - 1
                item.request.num_draft_tokens += len(item.drafts)
                item.request.num_accepted_tokens += num_accepted
                totals.draft_tokens += len(item.drafts)
                totals.accepted_tokens += num_accepted
        drafted, self._drafted = self._drafted, []
        for request in drafted:
            if request.state is RequestState.RUNNING:
                self._tables.trim(request, step)

    def needs_tokens_of(self, running: StepPlan) -> bool:
        return self.drafter.needs_tokens_of(running)

    def remove_request(self, request: Request) -> None:
        self.drafter.remove_request(request)

    def _allocate_draft_blocks(self, request: Request, stop: int, count: int, step: int, plan: PlanBuilder) -> int:
        """Allocate blocks for up to `count` drafts from position `stop` on, without preemption. Returns how
        many drafts fit.
        """
        available = self._tables.num_available(request)
        while count and self._tables.num_needed(request, stop + count) > available:
            count -= 1
        needed = self._tables.num_needed(request, stop + count) if count else 0
        if needed:
            self._drafted.append(request)
            self._tables.grow(request, needed, step, plan)
        return count
