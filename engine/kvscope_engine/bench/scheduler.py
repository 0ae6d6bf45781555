"""`kvscope-engine bench scheduler`: what scheduler and pool cost a scheduled request, small beside large, one core.

Both loads run the same mix (decodes, a block more every 16 tokens, requests that end and others that are admitted);
they take turns, medians over the rounds, ratios within a round.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

from kvscope_engine.bench.steady_load import BLOCKS_PER_REQUEST, HOST_BLOCKS_PER_REQUEST, KINDS, Cost, SteadyLoad
from kvscope_engine.bench.table import table
from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_telemetry.errors import BadInput

BLOCK_SIZE: Final = 16
PROMPT_BLOCKS: Final = 64
OUTPUT_BLOCKS: Final = 16
POOL_BLOCKS, POOL_LIVES = 100_000, 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
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


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
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
        "pool_operations_per_s": pool_operations_per_s(min(large.num_blocks, POOL_BLOCKS), POOL_LIVES),
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
            f"{one['num_running']:,}",
            f"{one['num_blocks']:,}",
            f"{one['ns_per_scheduled_request']:.0f}",
            f"{one['schedule_ns']:.0f}",
            f"{one['commit_ns']:.0f}",
            f"{one['finish_ns']:.0f}",
            f"{one['step_ms']:.2f}",
            f"{one['evicted_per_scheduled']:.3f}",
            f"{one['offloaded_per_scheduled']:.3f}",
            f"{one['block_operations_per_s']:,.0f}",
        ]
        for one in (report["small"], report["large"])
    ]
    host = f", {HOST_BLOCKS_PER_REQUEST} host places" if report["pool"] == "offloading" else ""
    return (
        f"{table(header, rows)}\n\nlarge over small: {report['large_over_small']:.2f} x (load average"
        f" {report['load_average']:.1f}, {BLOCKS_PER_REQUEST} blocks a request{host})\nthe pool alone:"
        f" {report['pool_operations_per_s']:,.0f} block operations/s\nA block operation is one block allocated, hit,"
        " written, sealed, evicted, offloaded or released; evicted and offloaded are given for each scheduled request."
    )


def pool_operations_per_s(num_blocks: int, num_histories: int) -> float:
    """How fast the block pool alone is: the life of a request's blocks, again and again.

    Block operations a second of one core; one is a block in a call of allocate, write, seal, release or hit.

    A life: 64 blocks allocated and written in one call each, sealed one by one (digests ready: hashing text is not
    the pool's), 16 allocated, written and sealed one at a time, all released in one call, the prompt's hit and
    released again. So 64 x 6 + 16 x 4 operations, and evictions once the pool is full of cached blocks.
    """
    pool = BlockPool(num_blocks, BLOCK_SIZE, salt=b"bench")
    elapsed_ns = 0
    for number in range(1, num_histories + 1):
        names = [
            number.to_bytes(16, "big") + place.to_bytes(16, "big") for place in range(PROMPT_BLOCKS + OUTPUT_BLOCKS)
        ]
        prefixes = [Prefix(name, BLOCK_SIZE * place, bytes(4 * BLOCK_SIZE)) for place, name in enumerate(names)]
        started = time.thread_time_ns()
        _live(pool, number, prefixes)
        elapsed_ns += time.thread_time_ns() - started
        pool.take_changed()
    return num_histories * (6 * PROMPT_BLOCKS + 4 * OUTPUT_BLOCKS) / (elapsed_ns / 1e9)


def _live(pool: BlockPool, number: int, prefixes: list[Prefix]) -> None:
    blocks = pool.allocate(PROMPT_BLOCKS, number)
    pool.write(blocks, [BLOCK_SIZE] * PROMPT_BLOCKS, [number] * PROMPT_BLOCKS, number)
    for block, prefix in zip(blocks, prefixes, strict=False):
        pool.seal(block, prefix)
    for prefix in prefixes[PROMPT_BLOCKS:]:
        (block,) = pool.allocate(1, number)
        pool.write([block], [BLOCK_SIZE], [number], number)
        pool.seal(block, prefix)
        blocks.append(block)
    pool.release(blocks, number)
    pool.hit(blocks[:PROMPT_BLOCKS], number)
    pool.release(blocks[:PROMPT_BLOCKS], number)
