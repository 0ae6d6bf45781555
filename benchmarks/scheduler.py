"""Measure the CPU time of scheduler and block pool per scheduled request, for a small and a large load on one core.

Both loads run the same mix: decodes, a new block every 16 tokens, requests that end and others that are admitted. They
alternate; medians are over the rounds, ratios within a round. No model, no tensors.

A fixed number of requests runs: each that ends is followed by a new one, and the pool has 100 blocks for each. Two
loads of different sizes thus do the same work per request, and only their size differs. There are three kinds of pools:
initially with free blocks (`free`); full of cached blocks, so that a block is evicted for each allocation (`evicting`);
and full, above host memory that is full as well, to which evicted blocks are offloaded (`offloading`).
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, Final

from benchmarks.command_line import run_benchmark
from kvscope_engine.policy.allocation.allocators import make_allocation
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.scheduler import Scheduler, SchedulerConfig
from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_engine.simulator.costs.cost_model import PRESETS
from kvscope_engine.simulator.simulated_mover import SimulatedMover
from kvscope_engine.text_table import table
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

BLOCK_SIZE: Final = 16
PROMPT_BLOCKS: Final = 64
OUTPUT_BLOCKS: Final = 16
POOL_BLOCKS, POOL_HISTORIES = 100_000, 2000
OWNER: Final = (1 << 31) - 1
"""Request number that no request has, used as the owner of cached blocks."""
TEXT_BLOCKS: Final = 64
"""Number of blocks per text in the prefix cache."""
BLOCKS_PER_REQUEST: Final = 100
HOST_BLOCKS_PER_REQUEST: Final = 50
KINDS: Final = ("free", "evicting", "offloading")
PROMPT_TOKENS: Final = (512, 1536)
OUTPUT_TOKENS: Final = (128, 384)
SHARED_TOKENS: Final = 256
"""Number of tokens in each of the eight texts with which every second prompt begins."""
STEP_TOKENS_PER_REQUEST: Final = 8
WARM_STEPS: Final = 30
SAMPLING: Final = ResolvedSampling(temperature=0.0, ignore_eos=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--small", type=int, default=100, metavar="REQUESTS", help="running requests in the small load")
    add("--large", type=int, default=10_000, metavar="REQUESTS", help="running requests in the large load")
    add("--repeats", type=int, default=15, metavar="N", help="rounds")
    add("--steps", type=int, default=2, metavar="N", help="of the large load in a round; the small one gets as many"
        " more as it is smaller")  # fmt: skip
    add("--no-prefix-caching", action="store_true", help="without hashes")
    add("--pool", choices=KINDS, default="free", help="with free blocks at first; full of cached ones, so that each"
        " block given is evicted before; and above a host memory, full as well, to which these sink")  # fmt: skip
    add("--profile", action="store_true", help="profile the large load instead")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.small <= args.large <= 1 << 16 or args.repeats < 1 or args.steps < 1:
        raise BadInput(
            f"small={args.small}, large={args.large}, repeats={args.repeats}, steps={args.steps} are not accepted:"
            " 1 or more each, small at most large, large at most 65536"
        )
    if args.no_prefix_caching and args.pool != "free":
        raise BadInput(f"pool={args.pool!r} is not accepted without prefix caching: nothing is cached then")
    large = SteadyLoad(args.large, prefix_caching=not args.no_prefix_caching, kind=args.pool)
    if args.profile:
        print(_profile(large, args.repeats * args.steps))
        return 0
    small = SteadyLoad(args.small, prefix_caching=not args.no_prefix_caching, kind=args.pool)
    rounds = _rounds(small, large, args)
    report = {
        "pool": args.pool,
        "load_average": os.getloadavg()[0],
        "small": _summary(small, [pair[0] for pair in rounds]),
        "large": _summary(large, [pair[1] for pair in rounds]),
        "large_over_small": statistics.median(_ns(b) / _ns(a) for a, b in rounds),
        "pool_operations_per_s": pool_operations_per_s(min(large.num_blocks, POOL_BLOCKS), POOL_HISTORIES),
    }
    print(json.dumps(report) if args.json else _text(report))
    return 0


def _rounds(small: SteadyLoad, large: SteadyLoad, args: argparse.Namespace) -> list[tuple[Cost, Cost]]:
    small_steps = args.steps * args.large // args.small
    return [(small.run(small_steps), large.run(args.steps)) for _ in range(args.repeats)]


def _ns(cost: Cost) -> float:
    return cost.total_ns / cost.num_scheduled


def _summary(load: SteadyLoad, costs: Sequence[Cost]) -> dict[str, Any]:
    def median(part: str) -> float:
        return statistics.median([float(getattr(cost, part)) / cost.num_scheduled for cost in costs])

    return {
        "num_blocks": load.num_blocks,
        "num_running": load.num_running,
        "ns_per_scheduled_request": median("total_ns"),
        "schedule_ns": median("schedule_ns"),
        "commit_ns": median("commit_ns"),
        "finish_ns": median("finish_ns"),
        "step_ms": statistics.median(cost.total_ns / cost.num_steps / 1e6 for cost in costs),
        "block_operations_per_s": statistics.median(cost.block_operations / (cost.total_ns / 1e9) for cost in costs),
        "evicted_per_scheduled": sum(cost.num_evicted for cost in costs) / sum(cost.num_scheduled for cost in costs),
        "offloaded_per_scheduled": sum(cost.num_offloaded for cost in costs)
        / sum(cost.num_scheduled for cost in costs),
        "finished_per_scheduled": sum(cost.num_finished for cost in costs) / sum(cost.num_scheduled for cost in costs),
    }


def _profile(load: SteadyLoad, num_steps: int) -> str:
    profile = cProfile.Profile()
    profile.runcall(load.run, num_steps)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue()


def _text(report: dict[str, Any]) -> str:
    header = [
        "running",
        "blocks",
        "ns a scheduled request",
        "schedule",
        "commit",
        "finish, add",
        "ms a step",
        "evicted",
        "offloaded",
        "block ops/s",
    ]
    rows = [
        [
            f"{result['num_running']:,}",
            f"{result['num_blocks']:,}",
            f"{result['ns_per_scheduled_request']:.0f}",
            f"{result['schedule_ns']:.0f}",
            f"{result['commit_ns']:.0f}",
            f"{result['finish_ns']:.0f}",
            f"{result['step_ms']:.2f}",
            f"{result['evicted_per_scheduled']:.3f}",
            f"{result['offloaded_per_scheduled']:.3f}",
            f"{result['block_operations_per_s']:,.0f}",
        ]
        for result in (report["small"], report["large"])
    ]
    host = f", {HOST_BLOCKS_PER_REQUEST} host places" if report["pool"] == "offloading" else ""
    return (
        f"{table(header, rows)}\n\nlarge over small: {report['large_over_small']:.2f} x (load average"
        f" {report['load_average']:.1f}, {BLOCKS_PER_REQUEST} blocks a request{host})\nthe pool alone:"
        f" {report['pool_operations_per_s']:,.0f} block operations/s\nA block operation is one block allocated, hit,"
        " written, sealed, evicted, offloaded or released; evicted and offloaded are given for each scheduled request."
    )


def pool_operations_per_s(num_blocks: int, num_histories: int) -> float:
    """Return the block operations per second of the block pool alone, on one core.

    An operation is one block in a call of allocate, write, seal, release or hit. In each history, 64 blocks are
    allocated and written in one call each and sealed individually (their digests exist: hashing text is not part of the
    pool), 16 blocks are allocated, written and sealed one at a time, all are released in one call, and the prompt's
    blocks are hit and released again: 64 x 6 + 16 x 4 operations. Once the pool is full of cached blocks, there are
    evictions in addition.
    """
    pool = BlockPool(num_blocks, BLOCK_SIZE, salt=b"bench")
    elapsed_ns = 0
    for number in range(1, num_histories + 1):
        names = [
            number.to_bytes(16, "big") + index.to_bytes(16, "big") for index in range(PROMPT_BLOCKS + OUTPUT_BLOCKS)
        ]
        prefixes = [Prefix(name, BLOCK_SIZE * index, bytes(4 * BLOCK_SIZE)) for index, name in enumerate(names)]
        started = time.thread_time_ns()
        _run_block_history(pool, number, prefixes)
        elapsed_ns += time.thread_time_ns() - started
        pool.changed_rows.drain()
    return num_histories * (6 * PROMPT_BLOCKS + 4 * OUTPUT_BLOCKS) / (elapsed_ns / 1e9)


def _run_block_history(pool: BlockPool, number: int, prefixes: list[Prefix]) -> None:
    blocks = pool.allocate(PROMPT_BLOCKS, number)
    pool.record_write(blocks, [BLOCK_SIZE] * PROMPT_BLOCKS, [number] * PROMPT_BLOCKS, number)
    for block, prefix in zip(blocks, prefixes, strict=False):
        pool.seal(block, prefix)
    for prefix in prefixes[PROMPT_BLOCKS:]:
        (block,) = pool.allocate(1, number)
        pool.record_write([block], [BLOCK_SIZE], [number], number)
        pool.seal(block, prefix)
        blocks.append(block)
    pool.release(blocks, number)
    pool.hit(blocks[:PROMPT_BLOCKS], number)
    pool.release(blocks[:PROMPT_BLOCKS], number)


@dataclass(slots=True)
class Cost:
    schedule_ns: int = 0
    commit_ns: int = 0
    finish_ns: int = 0
    """Time spent on ending requests and queueing their replacements."""
    num_scheduled: int = 0
    num_steps: int = 0
    num_finished: int = 0
    block_operations: int = 0
    num_evicted: int = 0
    num_offloaded: int = 0
    """Number of offloaded blocks. Evicted and offloaded blocks also count as block operations."""

    @property
    def total_ns(self) -> int:
        return self.schedule_ns + self.commit_ns + self.finish_ns


class SteadyLoad:
    """A constant load of `num_running` decoding requests on a pool of `100 x num_running` blocks, warmed up on
    construction.

    `kind` is one of `KINDS`. All kinds but `free` need the prefix cache.
    """

    def __init__(self, num_running: int, *, prefix_caching: bool = True, kind: str = "free") -> None:
        self.num_running = num_running
        self.kind = kind
        self.num_blocks = BLOCKS_PER_REQUEST * num_running
        self._random = Random(num_running)
        num_host = HOST_BLOCKS_PER_REQUEST * num_running if kind == "offloading" else 0
        self._mover = SimulatedMover(PRESETS["llama-3.1-8b"].cost, 1, has_disk=False) if num_host else None
        self._pool = BlockPool(
            self.num_blocks,
            BLOCK_SIZE,
            prefix_caching=prefix_caching,
            salt=b"bench",
            other_tiers={Tier.HOST: num_host},
        )
        tokens = PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]
        self._scheduler = Scheduler(
            self._pool,
            make_allocation("paged", self._pool, max_model_len=tokens),
            SchedulerConfig(
                max_num_seqs=num_running,
                max_num_batched_tokens=max(tokens, STEP_TOKENS_PER_REQUEST * num_running),
                max_model_len=tokens,
            ),
            mover=self._mover,
        )
        self._num_created = 0
        self._step = 0
        self._fill()

    def run(self, num_steps: int) -> Cost:
        cost = Cost()
        for _ in range(num_steps):
            self._advance(cost)
        return cost

    def _fill(self) -> None:
        for _ in range(self.num_running):
            self._scheduler.add_request(self._request(self._random.randint(1, OUTPUT_TOKENS[1])))
        while self._scheduler.totals.admitted < self.num_running:
            self._advance(Cost())
        if self.kind != "free":
            fill_pool(self._pool)
        self.run(WARM_STEPS)

    def _request(self, num_output_tokens: int) -> Request:
        self._num_created += 1
        length = self._random.randint(*PROMPT_TOKENS)
        shared = [-1 - self._num_created // 2 % 8] * SHARED_TOKENS if self._num_created % 2 else []
        return Request(
            number=self._num_created,
            request_id=str(self._num_created),
            prompt_token_ids=(*shared, *[self._num_created] * (length - len(shared))),
            sampling=SAMPLING,
            max_tokens=num_output_tokens,
            arrival_ns=self._num_created,
        )

    def _advance(self, cost: Cost) -> None:
        self._step += 1
        scheduler, clock = self._scheduler, time.thread_time_ns
        evicted, offloaded = self._pool.evicted_blocks, scheduler.totals.offloaded_blocks
        if self._mover is not None:
            self._mover.start_step(self._step)
        started = clock()
        plan = scheduler.schedule(self._step, self._step)
        scheduled = clock()
        cost.block_operations += num_block_operations(plan)
        resumed = clock()
        scheduler.commit(plan, self._step, 0)
        committed = clock()
        finished_requests = list(_sample(plan))
        cost.block_operations += sum(len(request.block_table) for request in finished_requests)
        next_requests = [self._request(self._random.randint(*OUTPUT_TOKENS)) for _ in finished_requests]
        finishing = clock()
        for request, next_request in zip(finished_requests, next_requests, strict=True):
            scheduler.finish(request, "length", self._step)
            scheduler.add_request(next_request)
        finished = clock()
        scheduler.changes.drain()
        self._pool.changed_rows.drain()
        cost.schedule_ns += scheduled - started
        cost.commit_ns += committed - resumed
        cost.finish_ns += finished - finishing
        cost.num_scheduled += len(plan.scheduled)
        cost.num_steps += 1
        cost.num_finished += len(finished_requests)
        cost.num_evicted += self._pool.evicted_blocks - evicted
        cost.num_offloaded += scheduler.totals.offloaded_blocks - offloaded
        cost.block_operations += self._pool.evicted_blocks - evicted + scheduler.totals.offloaded_blocks - offloaded


def num_block_operations(plan: StepPlan) -> int:
    """Return the number of blocks allocated, hit, written and sealed in the step. Releases are counted by the
    caller.
    """
    return sum(map(_operations, plan.scheduled))


def _operations(item: Scheduled) -> int:
    """Return the number of block operations for one scheduled request. A block that is allocated, written and
    sealed counts three times; hits belong to a request's first step.
    """
    start, end, size = item.start, item.start + item.num_tokens, BLOCK_SIZE
    request = item.request
    hits = start // size if start == request.num_cached_tokens and not request.output_token_ids else 0
    allocated = -(-end // size) - -(-start // size)
    written = -(-end // size) - start // size
    return hits + allocated + written + end // size - start // size


def _sample(plan: StepPlan) -> Iterator[Request]:
    """Append a token to each request of the plan that samples one, and yield the requests that are then complete."""
    for item in plan.scheduled:
        if item.samples:
            output = item.request.output_token_ids
            output.append(item.request.number)
            if len(output) == item.request.max_tokens:
                yield item.request


def fill_pool(pool: BlockPool) -> None:
    """Fill the pool and host memory with cached blocks of texts that no request uses.

    Each later allocation then evicts a block, and offloads it if there is a lower tier.
    """
    names = count(1)
    _fill_with_cached_blocks(pool, pool.num_free, names)
    assert pool.num_cached, "requests hold every block of the pool"
    host = slice(pool.num_blocks, pool.num_blocks + pool.num_host)
    while missing := int((pool.ledger.hash[host] == 0).sum()):
        _fill_with_cached_blocks(pool, min(missing, pool.num_cached), names)


def _fill_with_cached_blocks(pool: BlockPool, num_blocks: int, names: count[int]) -> None:
    blocks, size = pool.allocate(num_blocks, OWNER), pool.block_size
    pool.record_write(blocks, [size] * num_blocks, [OWNER] * num_blocks, pool.step)
    for block in blocks:
        pool.seal(block, _prefix(next(names), size))
    pool.release(blocks, pool.step)


def _prefix(name: int, size: int) -> Prefix:
    """Return the prefix of the block with number `name`. Each block continues the prefix of the previous one,
    except the first block of a text.
    """
    index = name % TEXT_BLOCKS
    return Prefix(_digest(name), index * size, bytes(4 * size), _digest(name - 1) if index else b"")


def _digest(name: int) -> bytes:
    return name.to_bytes(32, "big")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
