"""The plan of a step under construction. It exists for the duration of one `schedule` call."""

from __future__ import annotations

from collections.abc import Callable

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan


class PlanBuilder:
    """Requests scheduled so far, and the remaining token budget."""

    __slots__ = (
        "_chunks",
        "_copies",
        "_drafted",
        "_singles",
        "budget",
        "evicted_for",
        "has_preempted",
        "now_ns",
        "num_copied",
    )

    def __init__(self, budget: int, now_ns: int) -> None:
        self.budget = budget
        """Number of tokens that may still be scheduled."""
        self.now_ns = now_ns
        self.has_preempted = False
        self.num_copied = 0
        """Number of blocks copied on write, including those of requests that were preempted later in this step."""
        self.evicted_for = 0
        """Number of the first request for which a cached block was evicted; 0 if none was."""
        self._singles: list[Scheduled] = []
        self._chunks: list[Scheduled] = []
        self._drafted: list[Scheduled] = []
        self._copies: list[tuple[Request, int, int]] = []

    def add(self, request: Request, start: int, num_tokens: int, samples: bool) -> None:
        item = Scheduled(request, start, num_tokens, samples)
        (self._singles if num_tokens == 1 else self._chunks).append(item)
        self.budget -= num_tokens

    @property
    def num_sampled(self) -> int:
        singles, chunks = (sum(item.samples for item in items) for items in (self._singles, self._chunks))
        return singles + chunks + sum(item.num_tokens for item in self._drafted)

    def draft(self, propose: Callable[[Scheduled, int], tuple[int, ...]]) -> None:
        """Add drafts to the scheduled single tokens. `propose(item, budget)` returns an item's drafts, at most
        `budget`.
        """
        singles, self._singles = self._singles, []
        for item in singles:
            drafts = propose(item, self.budget) if self.budget else ()
            if drafts:
                self._drafted.append(item._replace(num_tokens=1 + len(drafts), drafts=drafts))
                self.budget -= len(drafts)
            else:
                self._singles.append(item)

    def copy(self, request: Request, source: int, target: int) -> None:
        """Add a copy of block `source` to `target` for the request. The runner copies before it runs the step."""
        self._copies.append((request, source, target))

    def undo_copy_from(self, source: int) -> tuple[Request, int] | None:
        """Remove a copy from block `source` from the plan.

        Returns the request and the target of the copy, or None if there is no such copy.
        """
        for copy in self._copies:
            if copy[1] == source:
                self._copies.remove(copy)
                return copy[0], copy[2]
        return None

    def content_of(self, block: int) -> int:
        """Return the block that holds, before this step's copies, the content that `block` will hold after them."""
        return next((source for _, source, target in self._copies if target == block), block)

    def drop(self, request: Request) -> None:
        """Remove a preempted request from the plan, and return its tokens to the budget."""
        for items in (self._singles, self._drafted, self._chunks):
            for item in items:
                if item.request is request:
                    self.budget += item.num_tokens
            items[:] = [item for item in items if item.request is not request]
        self._copies = [copy for copy in self._copies if copy[0] is not request]

    def plan(self) -> StepPlan:
        copies = tuple((source, target) for _, source, target in self._copies)
        scheduled = (*self._singles, *self._drafted, *self._chunks)
        return StepPlan(scheduled, len(self._singles), copies)
