"""The first token of a prompt whose beginning is new, in the pool, in host memory, or on disk.

Pool and tiers are small, and other prompts in between push the beginning down: one from the pool to host memory,
four more from there to disk. What makes way for it when it comes back goes down as well, within the time measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvscope_engine.bench.reuse_cases.probe import Probe, Took
from kvscope_engine.bench.reuse_cases.sizes import BLOCK_SIZE, Setup, with_bounce
from kvscope_engine.bench.reuse_cases.spent import Spent, Stopwatch, summary
from kvscope_engine.policy.fit import num_blocks_for

WAYS: Final = ("new", "in the pool", "in host memory", "on disk")
FILLERS: Final = {"in host memory": 1, "on disk": 4}
"""Other prompts, as large as the pool, before the prefix is where it is to come from."""


def measure(setup: Setup, num_prefix: int, num_own: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Each way in each round, with a prefix of its own a round."""
    num_blocks = num_blocks_for(num_prefix + num_own + 1, BLOCK_SIZE) + num_blocks_for(num_own, BLOCK_SIZE) + 1
    config = setup.config(num_blocks, num_host=with_bounce(2 * num_blocks), num_disk=4 * num_blocks)
    rounds: dict[str, list[Spent]] = {way: [] for way in WAYS}
    with Probe(config) as probe:
        _fill(probe)
        for number in range(setup.repeats):
            tell(f"prefix: round {number + 1} of {setup.repeats}")
            for way, spent in _round(probe, num_prefix, num_own).items():
                rounds[way].append(spent)
        stats = probe.engine.tier_stats
        return {
            "num_prefix_tokens": num_prefix,
            "num_own_tokens": num_own,
            "disk_is_direct": stats is not None and stats.disk_is_direct,
            "tokenize_s": _tokenize_s(probe, num_prefix + num_own),
            "first_token": summary(rounds, WAYS[0]),
        }


def _round(probe: Probe, num_prefix: int, num_own: int) -> dict[str, Spent]:
    probe.engine.reset_prefix_cache()
    prefix = probe.ids(num_prefix)
    shared = num_prefix // BLOCK_SIZE
    found = {}
    for way in WAYS:
        for _ in range(FILLERS.get(way, 0)):
            _fill(probe)
        probe.engine.drain_tiers()
        took = Took(probe)
        found[way] = probe.first_token(prefix + probe.ids(num_own))
        took.expect(
            f"a prefix {way}",
            computed=num_prefix + num_own - (0 if way == "new" else shared * BLOCK_SIZE),
            loaded=shared if way in FILLERS else 0,
            risen=shared if way == "on disk" else 0,
        )
    return found


def _fill(probe: Probe) -> None:
    """Another prompt takes the whole pool."""
    probe.first_token(probe.ids(probe.engine.hello.cache.num_blocks * BLOCK_SIZE - 1))


def _tokenize_s(probe: Probe, count: int) -> float | None:
    """What a client that sends text waits for beside; None without a tokenizer."""
    tokenizer = probe.engine.tokenizer
    if tokenizer is None:
        return None
    text = tokenizer.decode(probe.ids(count))
    watch = Stopwatch()
    tokenizer.encode(text)
    return watch.spent.wall_s
