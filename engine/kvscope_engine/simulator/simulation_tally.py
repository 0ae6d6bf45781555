"""Counters of a simulated run, from which `simulation_report.py` computes the report."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableMapping
from math import nan

from kvscope_engine.policy.allocation.fragmentation import kv_use
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.scheduler import Scheduler
from kvscope_engine.policy.step_plan import StepPlan
from kvscope_engine.simulator.group_use import GroupTally
from kvscope_engine.simulator.memory_use import MemoryUse
from kvscope_telemetry.ledger import Tier


class SimulationTally:
    """Sums over the steps of a run, and values of finished requests in the order in which they ended.

    Times are in ns on the run's clock.
    """

    def __init__(self, groups: GroupTally | None = None, *, samples_memory: bool = True) -> None:
        """`samples_memory`: whether `memory` and `groups` are counted, which takes a part of each step's time."""
        self.groups = groups if samples_memory else None
        self.samples_memory = samples_memory
        self.num_steps = 0
        self.num_scheduled = 0
        self.num_scheduled_under_load = 0
        """Number of scheduled requests, summed over the steps that left requests waiting. `memory` samples the
        same steps.
        """
        self.memory = MemoryUse()
        self.num_refused = 0
        self.first_refusal = ""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache at the first admission of their request."""
        self.num_loaded_tokens = {Tier.HOST: 0, Tier.DISK: 0}
        """Cached prompt tokens (included in `num_cached_tokens`) that were loaded from each lower tier."""
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        """Tokens computed in all steps, including those of unfinished requests."""
        self.num_needed_tokens = 0
        """Tokens that the finished requests would have computed without preemptions."""
        self.num_preempted = 0
        self.numbers = array("q")
        """Number of each finished request, in the order of the arrays below."""
        self.ttft_ns = array("d")
        self.total_ns = array("d")
        self.per_token_ns = array("d")
        self.decode_ns = array("d")
        """Time from the first to the last token, per token after the first; NaN for a single token."""

    @property
    def num_finished(self) -> int:
        return len(self.total_ns)

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed again after preemptions; valid once the run has ended."""
        return self.num_computed_tokens - self.num_needed_tokens

    @property
    def num_ended(self) -> int:
        return self.num_finished + self.num_refused

    def step(self, plan: StepPlan, scheduler: Scheduler, pool: BlockPool) -> None:
        """Count a committed step. Call it before the step's finished requests are ended."""
        batch = len(plan.scheduled)
        self.num_steps += 1
        self.num_scheduled += batch
        self.num_computed_tokens += plan.num_tokens
        if self.groups is not None:
            self.groups.add(pool)
        if scheduler.num_waiting:
            self.num_scheduled_under_load += batch
            if self.samples_memory:
                self.memory.add(kv_use(pool, _holders(plan, scheduler)))

    def add_decode_steps(self, num_steps: int, num_requests: int, *, is_under_load: bool) -> None:
        """Count committed steps that computed one token for each of `num_requests`. `memory` and `groups` get no sample
        of them.
        """
        num_scheduled = num_steps * num_requests
        self.num_steps += num_steps
        self.num_scheduled += num_scheduled
        self.num_computed_tokens += num_scheduled
        if is_under_load:
            self.num_scheduled_under_load += num_scheduled

    def record_loaded(self, plan: StepPlan, block_size: int, origins: MutableMapping[int, Tier]) -> None:
        """Count and remove the blocks in `origins`, which maps blocks loaded in this step to their tiers.

        If several requests of the plan share a loaded block, it counts as a pool hit for all but the first. Blocks
        loaded for preempted requests do not count, because they are no hits of the prefix cache.
        """
        for item in plan.scheduled:
            request = item.request
            if item.start == request.num_cached_tokens or request.num_preemptions:
                tiers = [origins.pop(block, None) for block in request.held_blocks]
                for tier in tiers if not request.num_preemptions else ():
                    if tier is not None:
                        self.num_loaded_tokens[tier] += block_size

    def finish(self, request: Request) -> None:
        """Count a finished request. The times of its first and last token must be set."""
        assert request.first_token_ns is not None, f"request {request.number} ended without a token"
        assert request.last_token_ns is not None, f"request {request.number} has no end"
        num_output_tokens = len(request.output_token_ids)
        total_ns = request.last_token_ns - request.arrival_ns
        self.ttft_ns.append(request.first_token_ns - request.arrival_ns)
        self.total_ns.append(total_ns)
        self.per_token_ns.append(total_ns / num_output_tokens)
        self.numbers.append(request.number)
        decode_ns = request.last_token_ns - request.first_token_ns
        self.decode_ns.append(decode_ns / (num_output_tokens - 1) if num_output_tokens > 1 else nan)
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens
        self.num_output_tokens += num_output_tokens
        # The last token is never computed: nothing comes after it.
        self.num_needed_tokens += request.num_prompt_tokens - request.num_cached_tokens + num_output_tokens - 1
        self.num_preempted += request.num_preemptions > 0

    def record_refusal(self, cause: str) -> None:
        """Count a request that could not run even alone."""
        self.num_refused += 1
        self.first_refusal = self.first_refusal or cause


def _holders(plan: StepPlan, scheduler: Scheduler) -> Iterable[Request]:
    """Return a superset of the requests that hold blocks: the requests of the plan if it contains all running
    ones, otherwise all unfinished requests.
    """
    if len(plan.scheduled) == scheduler.num_running:
        return [item.request for item in plan.scheduled]
    return scheduler.requests.values()
