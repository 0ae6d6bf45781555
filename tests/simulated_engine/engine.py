"""An engine without a model: the real scheduler, block pool, lower tiers and frame builder on made-up requests.

`advance()` runs one step and returns its frame, `snapshot()` returns the whole state. Tokens come from a counter and
cost no computation, so pools of a million blocks can be driven. The same seed gives the same states. Imports no torch
and knows no sockets (`server.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.simulated_engine.background import BackgroundRequests, new_request
from tests.simulated_engine.filling import NUM_PARKED, fill
from tests.simulated_engine.hello import BLOCK_BYTES, BLOCK_TOKENS, simulated_hello
from tests.simulated_engine.step_work import forward_ns, work_of
from tests.simulated_engine.words import WordDetokenizer

from kvscope_engine.interventions import Interventions
from kvscope_engine.outputs import OutputStream
from kvscope_engine.policy.allocation.allocators import make_allocation
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.scheduler import Scheduler, SchedulerConfig
from kvscope_engine.policy.step_plan import Scheduled, StepPlan, StepResult
from kvscope_engine.simulator.costs.cost_model import PRESETS
from kvscope_engine.simulator.simulated_mover import SimulatedMover
from kvscope_engine.step_recorder import StepRecorder
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.commands import Finished, FinishReason, Tokens
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Frame, Heartbeat, Snapshot, Timings

MAX_TOKENS_IN_STEP = 2048
MAX_REQUEST_TOKENS = 1 << 24
MAX_CLIENT_REQUESTS = 64
"""Client requests that run at a time, beside background requests."""
NUM_WAITING = 4
PREEMPT_EVERY = 211
"""Steps between two forced preemptions; others happen when blocks run out."""
SWAP_EVERY = 19
"""The same with host memory, which makes preemptions cheap."""


class SimulatedEngine:
    """An engine in which `num_running` background requests decode at all times.

    When the engine starts, `cached_share` of the pool holds cached texts, and `parked_share` holds the blocks of long
    requests that do not continue, because the grammar of their output is never compiled. Raises BadInput for invalid
    tiers.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 4096,
        num_running: int = 32,
        seed: int = 0,
        epoch: int = 1,
        cached_share: float = 0.3,
        parked_share: float = 0.2,
        num_host_blocks: int = 0,
        num_disk_blocks: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        check_tiers(num_host_blocks, num_disk_blocks)
        self.step = 0
        self.outputs: list[Tokens | Finished] = []
        """Replies for clients, oldest first. The reader removes them."""
        self._clock = clock
        self._num_running = num_running
        self._publish: Callable[[Frame], object] = lambda frame: None
        self._last_frame: Frame | None = None
        self._streams: dict[int, OutputStream] = {}  # of client requests, by number
        self.pool = BlockPool(
            num_blocks,
            BLOCK_TOKENS,
            salt=b"simulated %d" % seed,
            other_tiers={Tier.HOST: num_host_blocks, Tier.DISK: num_disk_blocks},
        )
        self._mover: SimulatedMover | None = None
        if num_host_blocks:
            cost = PRESETS["llama-3.1-8b"].cost
            self._mover = SimulatedMover(cost, BLOCK_BYTES, has_disk=num_disk_blocks > 0)
        self._background = BackgroundRequests(seed, num_blocks * BLOCK_TOKENS)
        num_parked = int(num_blocks * parked_share) // NUM_PARKED
        self._num_parked = NUM_PARKED if num_parked else 0
        self.scheduler = Scheduler(
            self.pool,
            make_allocation("paged", self.pool, max_model_len=MAX_REQUEST_TOKENS),
            SchedulerConfig(
                max_num_seqs=num_running + self._num_parked + MAX_CLIENT_REQUESTS,
                max_num_batched_tokens=MAX_TOKENS_IN_STEP,
                max_model_len=MAX_REQUEST_TOKENS,
            ),
            mover=self._mover,
        )
        now_ns = clock()
        self.hello = simulated_hello(epoch, self.pool, self.scheduler, now_ns)
        fill(self.scheduler, self.pool, self._background, int(num_blocks * cached_share), num_parked, now_ns)
        self._recorder = StepRecorder(epoch, self.pool, self.scheduler, self._take_frame)
        self.interventions = Interventions(self.pool, self.scheduler, self.record_idle)
        self.ledger = self.pool.ledger

    def publish_to(self, publish: Callable[[Frame], object]) -> None:
        """Give each frame from the next on to `publish` as well."""
        self._publish = publish

    @property
    def seq(self) -> int:
        """Number of the last frame."""
        return self._recorder.seq

    @property
    def num_unfinished(self) -> int:
        """Number of requests in the queue or running."""
        return self.scheduler.num_running + self.scheduler.num_waiting

    def advance(self) -> Frame:
        """Run one step."""
        started_ns = self._clock()
        self.step += 1
        self._queue_background(started_ns)
        self.scheduler.limits.reduce(
            (MAX_TOKENS_IN_STEP, max(1, self._num_running + self._num_parked + len(self._streams)))
        )
        if self._mover is not None:
            self._mover.start_step(started_ns)
        plan = self.scheduler.schedule(self.step, started_ns)
        now_ns = self._clock()
        result = self._commit(plan, now_ns)
        if self.step % (SWAP_EVERY if self.pool.num_host else PREEMPT_EVERY) == 0:
            self._preempt_one(plan, now_ns)
        run_ns = max(0, now_ns - started_ns, result.forward_ns)
        timings = Timings(run_ns=run_ns, forward_ns=result.forward_ns)
        self._recorder.record(plan, result, timings, self.step, now_ns, work_of(plan))
        assert self._last_frame is not None, "recorded just now"
        return self._last_frame

    def record_idle(self) -> None:
        """Publish a frame of what changed without a step, if anything did."""
        self._recorder.record_idle(self.step, self._clock())

    def snapshot(self, tag: int = 0) -> Snapshot:
        """Return the whole state after the last frame; unpublished changes are published first."""
        return self._recorder.snapshot(self.hello, tag, self._clock())

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat."""
        return Heartbeat(
            epoch=self.hello.epoch,
            time_ns=self._clock(),
            seq=self.seq,
            step=self.step,
            num_unfinished=self.num_unfinished,
        )

    def submit(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> int:
        """Queue a client's request with a new prompt and return its number."""
        prompt = self._background.new_tokens(num_prompt_tokens)
        number = self.next_number()
        self.add_requests([new_request(number, request_id, prompt, max_tokens, self._clock(), client="client")])
        return number

    def next_number(self, count: int = 1) -> int:
        """Return the first of `count` unused request numbers."""
        return self._background.take_numbers(count)

    def add_requests(self, requests: list[Request]) -> None:
        """Queue the completions of a client's prompt. Their tokens come in `outputs`."""
        for request in requests:
            self.scheduler.check_fits(request)
        for request in requests:
            self.scheduler.add_request(request)
            self._streams[request.number] = OutputStream(request, request.request_id, WordDetokenizer(), frozenset())  # type: ignore[arg-type]

    def abort(self, number: int) -> bool:
        """End a request in any state; return whether it was unfinished."""
        request = self.scheduler.requests.get(number)
        if request is None:
            return False
        now_ns = self._clock()
        self.scheduler.abort(request, now_ns)
        self._end_stream(request, "abort", now_ns)
        return True

    def _queue_background(self, now_ns: int) -> None:
        while self._num_running and self.scheduler.num_waiting < NUM_WAITING:
            for request in self._background.next_requests(now_ns):
                self.scheduler.add_request(request)

    def _commit(self, plan: StepPlan, now_ns: int) -> StepResult:
        tokens = tuple(self._sample(item, now_ns) for item in plan.scheduled)
        self.scheduler.commit(plan, self.step, now_ns)
        for item in plan.scheduled:
            request = item.request
            if len(request.output_token_ids) == request.max_tokens:
                self.scheduler.finish(request, "length", now_ns)
                self._end_stream(request, "length", now_ns)
                self._background.remember(request)
        run_ns = forward_ns(work_of(plan), self.step) if plan.scheduled else 0
        return StepResult(tokens, forward_ns=run_ns)

    def _sample(self, item: Scheduled, now_ns: int) -> tuple[int, ...]:
        if not item.samples:
            return ()
        request, token = item.request, self._background.new_token()
        stream = self._streams.get(request.number)
        if stream is not None:
            stream.add_token(token, None, now_ns)
            self.outputs += stream.drain()
            return (token,)
        request.output_token_ids.append(token)
        if request.first_token_ns is None:
            request.first_token_ns = now_ns
        request.last_token_ns = now_ns
        return (token,)

    def _end_stream(self, request: Request, reason: FinishReason, now_ns: int) -> None:
        stream = self._streams.pop(request.number, None)
        if stream is not None:
            stream.finish(reason, now_ns)
            self.outputs += stream.drain()

    def _preempt_one(self, plan: StepPlan, now_ns: int) -> None:
        """Preempt a background request that ran in the step, and swap its blocks to host memory if there is room."""
        running = [item.request for item in plan.scheduled if item.request.state is RequestState.RUNNING]
        victims = [request for request in running if request.number not in self._streams]
        if not victims:
            return
        victim = victims[self._background.random.integers(len(victims))]
        how = "swap" if self.pool.num_host else "recompute"
        if self.scheduler.preempt(victim, how, "the simulation", now_ns) is None:
            self.scheduler.preempt(victim, "recompute", "the simulation", now_ns)

    def _take_frame(self, frame: Frame) -> None:
        self._last_frame = frame
        self._publish(frame)


def check_tiers(num_host_blocks: int, num_disk_blocks: int) -> None:
    """Raise BadInput for tiers of negative size, and for a disk without host memory."""
    if min(num_host_blocks, num_disk_blocks) < 0:
        raise BadInput(f"{num_host_blocks} host and {num_disk_blocks} disk blocks: 0 or more of each are accepted")
    if num_disk_blocks and not num_host_blocks:
        raise BadInput(f"{num_disk_blocks} disk blocks are not accepted without host blocks above them")
