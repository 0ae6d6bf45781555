"""Simulates consecutive steps in which each running request only gets its next token, without planning each of them.

Nothing that a scheduler decides can change during such steps: no request arrives, is admitted, is preempted or ends.
Per step, only the requests that begin or complete a block cost time. Requests and pool end in the same state as after
the steps of the scheduler, and all times are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.plan_builder import PlanBuilder
from kvscope_engine.policy.scheduling.request_prefixes import seal_blocks
from kvscope_engine.policy.scheduling.scheduler import Scheduler

StepTime = Callable[[int, int], int]
"""Returns the time of a step in ns, from the number of its requests and the sum of their contexts in tokens."""


@dataclass(frozen=True, slots=True)
class DecodedSteps:
    num_steps: int
    now_ns: int
    """Time at the end of the last step."""


class DecodeRun:
    """Runs the decode steps of one scheduler. Its pool has one KV group without a window, no lower tiers and no
    recurrent states, and its allocation policy reserves nothing.
    """

    def __init__(self, scheduler: Scheduler, pool: BlockPool, step_time: StepTime) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._step_time = step_time
        self._size = pool.block_size

    def num_steps(self, running: Sequence[Request]) -> int:
        """Return for how many steps all of `running` only decode: until one of them gets its last token.

        The step with the last token is not included. 0 if a request computes more than one token, or has none yet.
        """
        if not running or len(running) > self._scheduler.limits.max_step_tokens:
            return 0
        if self._scheduler.tables.has_shared_last_blocks or not all(map(self._decodes, running)):
            return 0
        return min(request.max_tokens - request.num_output_tokens for request in running) - 1

    def _decodes(self, request: Request) -> bool:
        num_computed = request.num_computed_tokens
        return (
            num_computed + 1 == request.num_tokens
            and num_computed >= max(request.num_prompt_tokens, request.num_lost_tokens)
            and len(request.block_table) == -(-num_computed // self._size)
        )

    def run(
        self, running: Sequence[Request], num_steps: int, first_step: int, now_ns: int, until_ns: int | None
    ) -> DecodedSteps:
        """Run up to `num_steps` steps, the first of which has number `first_step` and starts at `now_ns`.

        `running` are all running requests in the order of their rank. Ends earlier if a step would start at or after
        `until_ns`, or if too few blocks are available for it.
        """
        pool, size, num_requests = self._pool, self._size, len(running)
        by_phase: list[list[Request]] = [[] for _ in range(size)]  # by the slot of the next token in its block
        first_positions: dict[int, int] = {}
        for request in running:
            first_positions[request.number] = request.num_computed_tokens
            by_phase[request.num_computed_tokens % size].append(request)
        context = sum(first_positions.values())
        written = _WrittenBlocks()
        builder = PlanBuilder(0, now_ns)
        count = 0
        while count < num_steps and (until_ns is None or now_ns < until_ns):
            beginning, completing = by_phase[-count % size], by_phase[(-count - 1) % size]
            if len(beginning) > pool.num_available:
                break
            step = pool.step = first_step + count
            for request in beginning:
                self._scheduler.tables.grow(request, 1, step, builder)
            context += num_requests
            now_ns += self._step_time(num_requests, context)
            for request in completing:
                self._complete_block(request, first_positions[request.number] + count + 1, step, written)
            count += 1
        for request in running:
            end = first_positions[request.number] + count
            _append_tokens(request, end + 1)
            request.num_computed_tokens = end
            if count and end % size:
                written.add(request, end // size, end % size, first_step + count - 1)
        pool.record_write(written.blocks, written.filled, written.owners, written.steps)
        return DecodedSteps(count, now_ns)

    def _complete_block(self, request: Request, end: int, step: int, written: _WrittenBlocks) -> None:
        """Seal the block that ends with position `end` (exclusive)."""
        index = end // self._size - 1
        _append_tokens(request, end)
        seal_blocks(self._pool, request, index, index + 1)
        written.add(request, index, self._size, step)


class _WrittenBlocks:
    """Blocks with their filled slots, owners, and the steps of their last write."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.filled: list[int] = []
        self.owners: list[int] = []
        self.steps: list[int] = []

    def add(self, request: Request, index: int, num_filled: int, step: int) -> None:
        self.blocks.append(request.block_table[index])
        self.filled.append(num_filled)
        self.owners.append(request.number)
        self.steps.append(step)


def _append_tokens(request: Request, num_tokens: int) -> None:
    """Append simulated output tokens until the request has `num_tokens` tokens."""
    missing = num_tokens - request.num_tokens
    if missing > 0:
        request.output_token_ids += [-request.number] * missing
