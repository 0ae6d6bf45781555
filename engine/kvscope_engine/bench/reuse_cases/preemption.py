"""A preempted request's next token: its blocks swapped in from host memory or disk, or its tokens computed again.

The pool holds the victim and a keeper of higher priority that takes one block more than there is once the victim
has computed exactly the tokens asked for. The time runs from the step in which the victim comes back, the keeper
gone, to the end of the one that gives its next token. There is no prefix cache: nothing of the victim is left in the
pool. For disk a second victim of the same size is preempted, for which the first has to leave host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvscope_engine.bench.reuse_cases.probe import Probe, Took
from kvscope_engine.bench.reuse_cases.sizes import BLOCK_SIZE, Setup, with_bounce
from kvscope_engine.bench.reuse_cases.spent import Spent, Stopwatch, summary
from kvscope_engine.policy.fit import num_blocks_for
from kvscope_telemetry.errors import BadInput, KvscopeError

RECOMPUTE, HOST, DISK = "computed again", "from host memory", "from disk"
WAYS: Final = (RECOMPUTE, HOST, DISK)


@dataclass(frozen=True, slots=True)
class Shape:
    """A victim preempted with `num_tokens` computed."""

    num_tokens: int

    @property
    def held_blocks(self) -> int:
        """The victim's in the end."""
        return num_blocks_for(self.num_tokens, BLOCK_SIZE)

    @property
    def spare_blocks(self) -> int:
        """Left free at an admission: the scheduler's watermark of 1 % of the pool."""
        spare = 1
        while (self.held_blocks + 1 + spare) // 100 > spare:
            spare += 1
        return spare

    @property
    def pool_blocks(self) -> int:
        """The victim's, one of the keeper's prompt, and those it takes until there is none."""
        return self.held_blocks + 1 + self.spare_blocks

    @property
    def num_prompt_tokens(self) -> int:
        """The victim's. The keeper computes a block in its first step, then a token a step, and so does the victim."""
        return self.num_tokens - BLOCK_SIZE * self.spare_blocks - 1


def measure(setup: Setup, num_tokens: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Each way in each round."""
    shape = Shape(num_tokens)
    if shape.num_prompt_tokens < 1:
        raise BadInput(f"--preempted-tokens {num_tokens} is not accepted: at least {BLOCK_SIZE + 2}")
    rounds: dict[str, list[Spent]] = {way: [] for way in WAYS}
    places = {"num_host": with_bounce(shape.held_blocks), "num_disk": 2 * shape.held_blocks}
    plain = setup.config(shape.pool_blocks, caching=False, preemption="recompute")
    tiered = setup.config(shape.pool_blocks, caching=False, preemption="swap", **places)
    with Probe(plain) as recompute, Probe(tiered) as swap:
        for number in range(setup.repeats):
            tell(f"preemption: round {number + 1} of {setup.repeats}")
            for way in WAYS:
                rounds[way].append(_comes_back(recompute if way == RECOMPUTE else swap, shape, way))
    return {
        "num_tokens": num_tokens,
        "num_blocks": shape.held_blocks,
        "next_token": summary(rounds, RECOMPUTE),
    }


def _comes_back(probe: Probe, shape: Shape, way: str) -> Spent:
    victim, keeper = _preempt_one(probe, shape, priority=0)
    present = [keeper]
    if way == DISK:
        probe.abort(keeper)
        present = list(_preempt_one(probe, shape, priority=2))
        probe.engine.drain_tiers()
    for name in present:
        probe.abort(name)
    took, watch = Took(probe), Stopwatch()
    said = probe.step()
    _check_resumed(probe)
    if (victim, 0) not in said:
        probe.token_of(victim)
    spent = watch.spent
    loaded = 0 if way == RECOMPUTE else shape.held_blocks
    computed = shape.num_prompt_tokens if way == RECOMPUTE else 0
    risen = loaded if way == DISK else 0
    took.expect(f"a request {way}", computed=computed, loaded=loaded, risen=risen, with_output=way == RECOMPUTE)
    probe.stop_all(victim)
    return spent


def _preempt_one(probe: Probe, shape: Shape, priority: int) -> tuple[str, str]:
    """The victim, just preempted, and its keeper, which runs; everyone else there is of lower priority and waits."""
    before = probe.counters.preemptions
    victim = probe.submit(probe.ids(shape.num_prompt_tokens), _more_than(shape), priority=priority)
    probe.token_of(victim)
    keeper = probe.submit(probe.ids(BLOCK_SIZE), _more_than(shape), priority=priority + 1)
    probe.until(lambda: probe.counters.preemptions > before)
    return victim, keeper


def _more_than(shape: Shape) -> int:
    """Output tokens: enough to get to the preemption and one token beyond, within what the pool could hold."""
    return BLOCK_SIZE * shape.spare_blocks + 3


def _check_resumed(probe: Probe) -> None:
    if "resumed" not in probe.events:
        raise KvscopeError("the preempted request did not come back in the step after the keeper's end")
