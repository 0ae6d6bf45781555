"""Runs a workload through the scheduler with one allocator, on a clock that the cost model advances.

Owns the clock, and replaces the engine: adds requests when they arrive, makes up the sampled tokens and ends requests
at their length. Scheduling and block allocation are the engine's own code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, Protocol

from kvscope_engine.policy.allocation.allocators import make_allocation, make_pool
from kvscope_engine.policy.block_needs import describe_length
from kvscope_engine.policy.kv_groups import ONE_GROUP
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.scheduler import Scheduler, SchedulerConfig
from kvscope_engine.policy.state_pool import StatePool, max_recorded_tokens
from kvscope_engine.policy.state_slots import host_slots, slots_and_blocks
from kvscope_engine.policy.step_plan import StepPlan, StepResult
from kvscope_engine.simulator.costs.cost_model import CostModel
from kvscope_engine.simulator.decode_run import DecodeRun
from kvscope_engine.simulator.group_use import GroupTally
from kvscope_engine.simulator.kv_layout import KVLayout
from kvscope_engine.simulator.recorded_drafter import recorded_drafter
from kvscope_engine.simulator.simulated_mover import SimulatedMover
from kvscope_engine.simulator.simulated_paging import SimulatedPaging
from kvscope_engine.simulator.simulated_tiers import SimulatedTiers
from kvscope_engine.simulator.simulation_limits import DEFAULT_STATE_INTERVAL, SimulatedLimits
from kvscope_engine.simulator.simulation_tally import SimulationTally
from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.sampling_params import ResolvedSampling
from kvscope_telemetry.messages.what_if import EXPANDED, NOT_FREED

SAMPLING: Final = ResolvedSampling(temperature=0.0, max_tokens=None, ignore_eos=True)
SALT: Final = b"simulation"


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """Configuration of a simulation. `allocator` is a name that `make_allocation` accepts."""

    workload: Workload
    limits: SimulatedLimits
    cost: CostModel
    allocator: str
    paging: SimulatedPaging = field(default_factory=SimulatedPaging)
    """Sizes of physical pages; used only by the allocator `virtual`."""
    tiers: SimulatedTiers = field(default_factory=SimulatedTiers)
    """Tiers below the KV pool. Used only by the allocator `paged`; the others support none."""
    layout: KVLayout | None = None
    """KV groups and recurrent states of the model; None for a single group with the cost model's bytes per token."""
    scenario: str = ""
    """Scenario of a what-if comparison in which the engine is changed: `NOT_FREED`, `EXPANDED`, or "" for none."""
    num_states: int = 0
    """Number of slots for recurrent states. Must be set if `layout` has states."""
    state_interval: int = DEFAULT_STATE_INTERVAL
    """Tokens between two checkpoints of a recurrent state."""
    variation: tuple[float, ...] = ()
    """Factors by which the time of a step varies; each step uses one of them at random. Empty for no variation."""
    seed: int = 0
    """Seed of the choice among `variation`."""

    @property
    def label(self) -> str:
        return f"{self.allocator}, {self.scenario}" if self.scenario else self.allocator

    @property
    def block_layout(self) -> KVLayout | None:
        """Layout for which blocks are allocated; None for a single KV group with full attention.

        Allocators other than `paged` have a single group, and free no block while its request runs.
        """
        if self.layout is None:
            return None
        layout = self.layout.expanded() if self.scenario == EXPANDED else self.layout
        return layout.merged() if self.scenario == NOT_FREED or self.allocator != "paged" else layout

    @property
    def attention_layout(self) -> KVLayout | None:
        """Layout that decides what attention reads: that of the model (with keys and values instead of latents
        for `EXPANDED`), even if the allocated blocks hold more. None for full attention in all layers.
        """
        return self.layout.expanded() if self.layout is not None and self.scenario == EXPANDED else self.layout

    @property
    def token_bytes(self) -> float:
        return self.cost.kv_bytes_per_token if self.block_layout is None else self.block_layout.token_bytes

    @property
    def block_bytes(self) -> int:
        if self.block_layout is not None:
            return self.block_layout.block_bytes(self.limits.block_size)
        return round(self.cost.kv_bytes_per_token * self.limits.block_size)

    def sized(
        self, kv_bytes: float, state_checkpoints: int | None = None, *, for_blocks: bool = False
    ) -> SimulationSetup:
        """Return a setup with the blocks and state slots that fit into `kv_bytes`, divided as in the engine.

        There are state slots for `max_num_seqs` requests and for `state_checkpoints` prefixes (default: as many as
        requests). With `for_blocks`, `kv_bytes` is for blocks alone, and states need memory in addition. Raises
        BadInput if not even one block fits.
        """
        limits = self.limits
        if self.layout is None or not self.layout.state_bytes:
            return replace(self, limits=limits.with_num_blocks(int(kv_bytes) // max(1, self.block_bytes)))
        for_prefixes = limits.max_num_seqs if state_checkpoints is None else state_checkpoints
        num_slots_wanted, longest = limits.max_num_seqs + for_prefixes, -(-limits.max_model_len // limits.block_size)
        if for_blocks:
            return replace(
                self,
                limits=limits.with_num_blocks(int(kv_bytes) // max(1, self.block_bytes)),
                num_states=num_slots_wanted + 1,
            )
        slots, blocks = slots_and_blocks(
            int(kv_bytes), self.block_bytes, self.layout.state_bytes, num_slots_wanted, longest
        )
        return replace(self, limits=limits.with_num_blocks(blocks), num_states=slots)

    @property
    def num_tier_blocks(self) -> tuple[int, int]:
        """Number of blocks that fit in host memory and on disk; (0, 0) unless the allocator is `paged`.

        Raises BadInput if a tier is smaller than one block or has too many blocks.
        """
        if self.allocator != "paged":
            return 0, 0
        host_state_bytes = self.num_host_states * self._state_bytes
        return replace(self.tiers, kv_host_memory=self.tiers.kv_host_memory - host_state_bytes).num_tier_blocks(
            self.block_bytes
        )

    @property
    def num_host_states(self) -> int:
        if not self.num_states or self.allocator != "paged":
            return 0
        return host_slots(self.tiers.kv_host_memory, self.block_bytes, self._state_bytes, self.num_states - 1)

    @property
    def state_copy_seconds(self) -> float:
        return self._state_bytes / self.cost.host_bandwidth

    @property
    def _state_bytes(self) -> int:
        return 0 if self.layout is None else self.layout.state_bytes


class StepObserver(Protocol):
    """Receives each step of a simulation. An observer must drain the scheduler's change log. Without an
    observer, the simulation drains it.
    """

    def step(self, plan: StepPlan, result: StepResult, waited_ns: int) -> None:
        """Called after a step, when its tokens have been added to the requests and finished requests have ended.

        `waited_ns`: time that the step waited for lower tiers before its forward pass.
        """

    def end(self) -> None: ...


class Simulation:
    """A pool, a scheduler, and a clock that starts at 0 ns. Deterministic: equal setups give equal runs.

    Without `samples_memory`, the tally has no memory use, and the simulation is faster. Raises BadInput for an
    allocator that does not exist or cannot manage such a pool.
    """

    def __init__(self, setup: SimulationSetup, *, samples_memory: bool = True) -> None:
        limits = setup.limits
        self._workload = setup.workload
        self._num_blocks = limits.num_blocks
        self._cost = setup.cost
        self._variation = setup.variation
        self._random = Random(setup.seed)
        self.allocator = setup.allocator
        self.setup = setup
        self._attention_layout, block_layout = setup.attention_layout, setup.block_layout
        has_prefix_cache = limits.enable_prefix_caching and setup.allocator == "paged"
        is_virtual = setup.allocator == "virtual"
        space = setup.paging.space(limits, setup.token_bytes) if is_virtual else None
        num_host, num_disk = setup.num_tier_blocks
        self.mover = SimulatedMover(setup.cost, setup.block_bytes, has_disk=num_disk > 0) if num_host else None
        self.pool = make_pool(
            setup.allocator,
            limits.num_blocks,
            limits.block_size,
            prefix_caching=has_prefix_cache,
            salt=SALT,
            other_tiers={
                Tier.HOST: num_host,
                Tier.DISK: num_disk,
                Tier.STATES: setup.num_states,
                Tier.HOST_STATES: setup.num_host_states,
            },
            space=space,
            groups=ONE_GROUP if block_layout is None else block_layout.rules,
        )
        self.states = None
        if setup.num_states:
            self.states = StatePool(
                self.pool,
                setup.state_interval,
                max_recorded_tokens(limits.max_model_len),
                keeps_checkpoints=has_prefix_cache,
                copy_seconds=setup.state_copy_seconds,
            )
        self._drafter = recorded_drafter(setup.workload)
        self.scheduler = Scheduler(
            self.pool,
            make_allocation(setup.allocator, self.pool, max_model_len=limits.max_model_len),
            SchedulerConfig(
                max_num_seqs=min(limits.max_num_seqs, setup.num_states - 1)
                if setup.num_states
                else limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                preemption=setup.tiers.preemption if self.mover is not None else "recompute",
            ),
            mover=self.mover,
            drafter=self._drafter,
            states=self.states,
        )
        # A step admits at most max_num_seqs requests. If more than that are queued in order of arrival, later arrivals
        # change nothing, so they are added later to save memory. The queue is then never longer than this.
        self._max_queued = limits.max_num_seqs + 1 if setup.workload.is_in_order else len(setup.workload.requests)
        self._first_completions: dict[str, int] = {}
        """Number of the newest request with index 0 of each request id."""
        self._num_added = 0
        self.now_ns = 0
        self.step_count = 0
        self.tally = SimulationTally(
            None if block_layout is None else GroupTally(block_layout), samples_memory=samples_memory
        )
        self._observer: StepObserver | None = None
        has_decode_runs = (
            block_layout is None
            and setup.allocator == "paged"
            and self.mover is None
            and self.states is None
            and self._drafter is None
        )
        self._decode_run = DecodeRun(self.scheduler, self.pool, self._decode_step_ns) if has_decode_runs else None
        self._blocked_state: tuple[int, ...] | None = None
        """`_queue_state` after a step in which requests only decoded and none was admitted, preempted or ended."""

    def observe(self, observer: StepObserver) -> None:
        self._observer = observer

    @property
    def num_requests(self) -> int:
        return len(self._workload.requests)

    def run(self) -> None:
        """Run until the last request has ended. Raises KvscopeError if the allocator can never place a request."""
        while self.advance():
            pass

    def advance(self) -> bool:
        """Run one step, or several in which requests only decode, or jump to the next arrival if nothing can run.

        Returns False once all requests have ended.
        """
        self._add_arrivals()
        if self._advance_decodes():
            return True
        started_ns, queue_state = self.now_ns, self._queue_state()
        only_decodes = self._decode_run is not None and self._decode_run.num_steps(self.scheduler.running) > 0
        plan = self._schedule()
        if plan.scheduled:
            self._step(plan, self.now_ns - started_ns)
            self._blocked_state = queue_state if only_decodes and queue_state == self._queue_state() else None
            return True
        if self.scheduler.requests:
            raise self._stuck_error()
        if self._num_added == self.num_requests:
            if self._observer is not None:
                self._observer.end()
            return False
        self.now_ns = max(self.now_ns, self._workload.requests[self._num_added].arrival_ns)
        return True

    def _queue_state(self) -> tuple[int, ...]:
        scheduler = self.scheduler
        return self._num_added, scheduler.num_running, scheduler.totals.preemptions, self.tally.num_ended

    def _advance_decodes(self) -> bool:
        """Run steps in which requests only decode, if they need no observer and no sample of the memory."""
        scheduler, decode_run = self.scheduler, self._decode_run
        if decode_run is None or self._observer is not None:
            return False
        is_under_load = scheduler.num_waiting > 0
        # After a step in which requests only decoded, blocks are only allocated: a waiting request that was not
        # admitted then does not fit now either.
        if is_under_load and (self.tally.samples_memory or self._blocked_state != self._queue_state()):
            return False
        running = scheduler.running
        num_steps = decode_run.num_steps(running)
        if num_steps < 1:
            return False
        until_ns = None
        if self._num_added < self.num_requests and scheduler.num_waiting < self._max_queued:
            until_ns = self._workload.requests[self._num_added].arrival_ns
        steps = decode_run.run(running, num_steps, self.step_count + 1, self.now_ns, until_ns)
        self.step_count += steps.num_steps
        self.now_ns = steps.now_ns
        self.tally.add_decode_steps(steps.num_steps, len(running), is_under_load=is_under_load)
        scheduler.changes.drain()
        return steps.num_steps > 0

    def _decode_step_ns(self, num_requests: int, context: int) -> int:
        return self._varied(self._cost.decode_step_ns(num_requests, context))

    def _varied(self, elapsed_ns: int) -> int:
        return max(1, round(elapsed_ns * self._random.choice(self._variation))) if self._variation else elapsed_ns

    def _schedule(self) -> StepPlan:
        """Plan the next step, and advance the clock by the time that the step waits for lower tiers."""
        if self.mover is None:
            return self.scheduler.schedule(self.step_count + 1, self.now_ns)
        self.mover.start_step(self.now_ns)
        plan = self.scheduler.schedule(self.step_count + 1, self.now_ns)
        self.now_ns = self.mover.now_ns
        return plan

    def _step(self, plan: StepPlan, waited_ns: int) -> None:
        self.step_count += 1
        elapsed_ns = self._varied(self._cost.step_ns(plan, self._attention_layout))
        self.now_ns += elapsed_ns
        self.scheduler.prefill_rate.observe(plan, elapsed_ns / 1e9)
        if plan.has_drafts:
            plan = self._accept_drafts(plan)
        self.scheduler.commit(plan, self.step_count, self.now_ns)
        self.tally.step(plan, self.scheduler, self.pool)
        if self.mover is not None and self.mover.origins:
            self.tally.record_loaded(plan, self.pool.block_size, self.mover.origins)
        for item in plan.scheduled:
            if item.samples:
                self._sample(item.request)
        if self._observer is None:
            self.scheduler.changes.drain()
        else:
            tokens = tuple(
                (-item.request.number,) * (item.num_tokens if item.drafts else 1) if item.samples else ()
                for item in plan.scheduled
            )
            self._observer.step(plan, StepResult(tokens, forward_ns=elapsed_ns), waited_ns)

    def _accept_drafts(self, plan: StepPlan) -> StepPlan:
        """Append the accepted drafts to their requests, and return the plan without the rejected ones."""
        assert self._drafter is not None, "drafts without a drafter"
        scheduled = []
        for item in plan.scheduled:
            if item.drafts:
                num_accepted = self._drafter.num_accepted(item.request, len(item.drafts))
                item.request.output_token_ids.extend([-item.request.number] * num_accepted)
                item = item._replace(num_tokens=1 + num_accepted)
            scheduled.append(item)
        return replace(plan, scheduled=tuple(scheduled))

    def _sample(self, request: Request) -> None:
        """Append the token id `-number` to request `number`, so that no other request's text contains this token."""
        output = request.output_token_ids
        output.append(-request.number)
        if request.first_token_ns is None:
            request.first_token_ns = self.now_ns
        if len(output) == request.max_tokens:
            request.last_token_ns = self.now_ns
            self._first_completions.pop(request.request_id, None)
            self.scheduler.finish(request, "length", self.now_ns)
            self.tally.finish(request)

    def _add_arrivals(self) -> None:
        requests = self._workload.requests
        while self._num_added < len(requests) and self.scheduler.num_waiting < self._max_queued:
            arrival = requests[self._num_added]
            if arrival.arrival_ns > self.now_ns:
                return
            self._num_added += 1
            self._add_request(arrival, self._num_added)

    def _add_request(self, arrival: WorkloadRequest, number: int) -> None:
        if arrival.request_id and not arrival.index:
            self._first_completions[arrival.request_id] = number
        request = Request(
            number=number,
            request_id=arrival.request_id or str(number),
            prompt_token_ids=tuple(self._workload.prompt_token_ids(arrival, -number)),
            sampling=SAMPLING,
            max_tokens=arrival.num_output_tokens,
            arrival_ns=arrival.arrival_ns,
            expected_tokens=arrival.num_prompt_tokens + arrival.num_output_tokens,
            index=arrival.index,
            priority=arrival.priority,
            parent=self._first_completions.get(arrival.request_id, 0) if arrival.index else 0,
            client=arrival.client,
        )
        try:
            self.scheduler.add_request(request)
        except BadInput as refusal:
            self.tally.record_refusal(str(refusal))

    def _stuck_error(self) -> KvscopeError:
        request = next(iter(self.scheduler.requests.values()))
        return KvscopeError(
            f"allocator {self.allocator!r} can never place request {request.number}"
            f" ({describe_length(request)})"
            f" in a pool of {self._num_blocks} blocks of {self.pool.block_size}: give it more blocks"
            " (--num-gpu-blocks-override) or a smaller --max-model-len"
        )
