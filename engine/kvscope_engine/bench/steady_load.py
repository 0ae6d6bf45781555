"""A scheduler over a pool under a load that stays the same: what `bench scheduler` times. No model, no tensors.

As many requests run as are asked for, each one that ends is followed by a new one; the pool has 100 blocks for each.
So two loads of different sizes do the same work per request, and whatever differs is the size. Three kinds of pools:
with free blocks at first (`free`), full of cached ones, so that each block given is evicted (`evicting`), and above a
host memory that is full as well, to which what is evicted is offloaded (`offloading`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Final

from kvscope_engine.policy.allocation.allocators import make_allocation
from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.plan import Scheduled, StepPlan
from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.scheduler import Scheduler
from kvscope_engine.simulator.costs.cost_model import PRESETS
from kvscope_engine.simulator.simulated_mover import SimulatedMover
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

OWNER: Final = (1 << 31) - 1
"""A request that never was."""
TEXT_BLOCKS: Final = 64
"""Of one text, each block after another: its first one is one of many beginnings."""
BLOCK_SIZE: Final = 16
BLOCKS_PER_REQUEST: Final = 100
HOST_BLOCKS_PER_REQUEST: Final = 50
KINDS: Final = ("free", "evicting", "offloading")
PROMPT_TOKENS: Final = (512, 1536)
OUTPUT_TOKENS: Final = (128, 384)
SHARED_TOKENS: Final = 256
"""Every second prompt begins with one of eight texts of this length."""
STEP_TOKENS_PER_REQUEST: Final = 8
WARM_STEPS: Final = 30
SAMPLING: Final = ResolvedSampling(temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Cost:
    """What steps took, in CPU time (others on the machine do not count), and did."""

    schedule_ns: int = 0
    commit_ns: int = 0
    finish_ns: int = 0
    """Ending requests and queueing those that follow them."""
    num_scheduled: int = 0
    num_steps: int = 0
    num_finished: int = 0
    block_operations: int = 0
    num_evicted: int = 0
    num_offloaded: int = 0
    """These two are block operations as well."""

    @property
    def total_ns(self) -> int:
        """Scheduler and pool together."""
        return self.schedule_ns + self.commit_ns + self.finish_ns


class SteadyLoad:
    """`num_running` requests that decode, and a pool of `100 x num_running` blocks; brought up to speed when made.

    `kind` is one of `KINDS`; all but `free` need the prefix cache.
    """

    def __init__(self, num_running: int, *, prefix_caching: bool = True, kind: str = "free") -> None:
        self.num_running = num_running
        self.kind = kind
        self.num_blocks = BLOCKS_PER_REQUEST * num_running
        self._random = Random(num_running)
        num_host = HOST_BLOCKS_PER_REQUEST * num_running if kind == "offloading" else 0
        self._mover = SimulatedMover(PRESETS["llama-3.1-8b"].cost, 1, has_disk=False) if num_host else None
        self._pool = BlockPool(
            self.num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching, salt=b"bench", num_host=num_host
        )
        tokens = PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]
        self._scheduler = Scheduler(
            self._pool,
            make_allocation("paged", self._pool, max_model_len=tokens),
            max_num_seqs=num_running,
            max_num_batched_tokens=max(tokens, STEP_TOKENS_PER_REQUEST * num_running),
            max_model_len=tokens,
            mover=self._mover,
        )
        self._numbers = 0
        self._step = 0
        self._fill()

    def run(self, num_steps: int) -> Cost:
        """What the next `num_steps` steps cost."""
        cost = Cost()
        for _ in range(num_steps):
            self._advance(cost)
        return cost

    def _fill(self) -> None:
        """Requests at every age, so that as many end in one step as in another."""
        for _ in range(self.num_running):
            self._scheduler.add_request(self._request(self._random.randint(1, OUTPUT_TOKENS[1])))
        while self._scheduler.totals.admitted < self.num_running:
            self._advance(Cost())
        if self.kind != "free":
            fill_pool(self._pool)
        self.run(WARM_STEPS)

    def _request(self, num_output_tokens: int) -> Request:
        self._numbers += 1
        length = self._random.randint(*PROMPT_TOKENS)
        shared = [-1 - self._numbers // 2 % 8] * SHARED_TOKENS if self._numbers % 2 else []
        return Request(
            number=self._numbers,
            request_id=str(self._numbers),
            prompt_token_ids=(*shared, *[self._numbers] * (length - len(shared))),
            sampling=SAMPLING,
            max_tokens=num_output_tokens,
            arrival_ns=self._numbers,
        )

    def _advance(self, cost: Cost) -> None:
        self._step += 1
        scheduler, clock = self._scheduler, time.thread_time_ns
        evicted, offloaded = self._pool.evicted_blocks, scheduler.totals.offloaded_blocks
        if self._mover is not None:
            self._mover.begin(self._step)
        started = clock()
        plan = scheduler.schedule(self._step, self._step)
        scheduled = clock()
        cost.block_operations += num_block_operations(plan)
        resumed = clock()
        scheduler.commit(plan, self._step, 0)
        committed = clock()
        done = list(_sample(plan))
        cost.block_operations += sum(len(request.block_table) for request in done)
        following = [self._request(self._random.randint(*OUTPUT_TOKENS)) for _ in done]
        finishing = clock()
        for request, next_request in zip(done, following, strict=True):
            scheduler.finish(request, "length", self._step)
            scheduler.add_request(next_request)
        finished = clock()
        scheduler.take_changes()
        self._pool.take_changed()
        cost.schedule_ns += scheduled - started
        cost.commit_ns += committed - resumed
        cost.finish_ns += finished - finishing
        cost.num_scheduled += len(plan.scheduled)
        cost.num_steps += 1
        cost.num_finished += len(done)
        cost.num_evicted += self._pool.evicted_blocks - evicted
        cost.num_offloaded += scheduler.totals.offloaded_blocks - offloaded
        cost.block_operations += self._pool.evicted_blocks - evicted + scheduler.totals.offloaded_blocks - offloaded


def num_block_operations(plan: StepPlan) -> int:
    """One for each block allocated, hit, written and sealed in the step; releases are counted where they happen."""
    return sum(map(_operations, plan.scheduled))


def _operations(item: Scheduled) -> int:
    """The request's first step has its hits too. A block that is allocated, written and sealed counts three times."""
    start, end, size = item.start, item.start + item.num_tokens, BLOCK_SIZE
    request = item.request
    hits = start // size if start == request.num_cached_tokens and not request.output_token_ids else 0
    allocated = -(-end // size) - -(-start // size)
    written = -(-end // size) - start // size
    return hits + allocated + written + end // size - start // size


def _sample(plan: StepPlan) -> Iterator[Request]:
    """The requests of the plan get their tokens; those that are done by it are given."""
    for item in plan.scheduled:
        if item.samples:
            output = item.request.output_token_ids
            output.append(item.request.number)
            if len(output) == item.request.max_tokens:
                yield item.request


def fill_pool(pool: BlockPool) -> None:
    """A pool without free blocks, for `bench scheduler`: all that no request holds is cached, and so is host memory.

    Every free block becomes one of a text that nobody holds; so again until host memory is full of such texts.

    From then on each block that is allocated is evicted before, and offloaded where there are lower tiers.
    """
    names = count(1)
    _cache(pool, pool.num_free, names)
    assert pool.num_cached, "requests hold every block of the pool"
    host = slice(pool.num_blocks, pool.num_blocks + pool.num_host)
    while missing := int((pool.ledger.hash[host] == 0).sum()):
        _cache(pool, min(missing, pool.num_cached), names)


def _cache(pool: BlockPool, num_blocks: int, names: count[int]) -> None:
    blocks, size = pool.allocate(num_blocks, OWNER), pool.block_size
    pool.write(blocks, [size] * num_blocks, [OWNER] * num_blocks, pool.step)
    for block in blocks:
        pool.seal(block, _prefix(next(names), size))
    pool.release(blocks, pool.step)


def _prefix(name: int, size: int) -> Prefix:
    """The `name`-th block of all texts: it follows the one before it, unless it begins a text."""
    place = name % TEXT_BLOCKS
    return Prefix(_digest(name), place * size, bytes(4 * size), _digest(name - 1) if place else b"")


def _digest(name: int) -> bytes:
    return name.to_bytes(32, "big")
