"""Several completions of one prompt, which share its blocks, against as many requests without a prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvscope_engine.bench.reuse_cases.probe import Probe, Took
from kvscope_engine.bench.reuse_cases.sizes import BLOCK_SIZE, Setup
from kvscope_engine.bench.reuse_cases.spent import Spent, Stopwatch, summary
from kvscope_engine.policy.fit import num_blocks_for

TOGETHER, APART = "one request", "a request each"
WAYS: Final = (APART, TOGETHER)
OUTPUT_TOKENS: Final = 64
"""More than anyone gets before all have one."""


def measure(setup: Setup, num_prompt: int, count: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Each way in each round: the time to the last first token, and the prompt tokens that were computed."""
    rounds: dict[str, list[Spent]] = {way: [] for way in WAYS}
    computed: dict[str, int] = {}
    num_blocks = 2 + (count + 1) * num_blocks_for(num_prompt + OUTPUT_TOKENS, BLOCK_SIZE)
    with Probe(setup.config(num_blocks, caching=False)) as probe:
        probe.first_token(probe.ids(num_prompt))
        for number in range(setup.repeats):
            tell(f"completions: round {number + 1} of {setup.repeats}")
            for way in WAYS:
                spent, computed[way] = _all_first_tokens(probe, num_prompt, count, way)
                rounds[way].append(spent)
    return {
        "num_completions": count,
        "num_prompt_tokens": num_prompt,
        "computed_prompt_tokens": computed,
        "last_first_token": summary(rounds, APART),
    }


def _all_first_tokens(probe: Probe, num_prompt: int, count: int, way: str) -> tuple[Spent, int]:
    prompt = probe.ids(num_prompt)
    took, watch = Took(probe), Stopwatch()
    if way == TOGETHER:
        names = [probe.submit(prompt, OUTPUT_TOKENS, n=count)]
    else:
        names = [probe.submit(prompt, OUTPUT_TOKENS) for _ in range(count)]
    said: set[tuple[str, int]] = set()
    while len(said) < count:
        said |= probe.step()
    spent, computed = watch.spent, took.computed
    probe.stop_all(*names)
    return spent, computed
