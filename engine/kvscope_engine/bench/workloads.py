"""Benchmark workloads: prompts as token ids, and the number of tokens to generate after each."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Final

EQUAL_PROMPT_TOKENS = 64
EQUAL_OUTPUT_TOKENS = 64
MIXED_SEED = 0
STEPS_BETWEEN = 4
SAMPLINGS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.6, "top_p": 0.9, "top_k": 0},
}
"""Sampling parameters by name. `top-p` has the values recommended for Llama."""


def sample_text() -> str:
    """Return the story that comes with kvscope, about 2,500 tokens long."""
    return files("kvscope_resources").joinpath("the-verdict.txt").read_text("utf-8")


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    name: str
    prompts: tuple[tuple[int, ...], ...]
    output_tokens: tuple[int, ...]
    steps_between: int = 0
    """Number of steps between arrivals. Contenders that cannot add requests later get all requests at the start."""

    @property
    def num_requests(self) -> int:
        return len(self.prompts)

    @property
    def arrivals(self) -> tuple[int, ...]:
        """Number of the step before which each request arrives, in the order of the prompts."""
        return tuple(index * self.steps_between for index in range(self.num_requests))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_tokens)


def equal(num_requests: int, text_ids: list[int]) -> BenchWorkload:
    """Return `num_requests` different prompts of 64 tokens, each with 64 tokens to generate."""
    prompts = tuple(_cyclic_slice(text_ids, index * 37, EQUAL_PROMPT_TOKENS) for index in range(num_requests))
    return BenchWorkload(f"{num_requests} equal", prompts, (EQUAL_OUTPUT_TOKENS,) * num_requests)


def mixed(num_requests: int, text_ids: list[int]) -> BenchWorkload:
    """Return prompts of 16 to 400 tokens with 8 to 256 tokens to generate.

    Both lengths are uniformly distributed, and identical in each run.
    """
    rng = random.Random(MIXED_SEED)
    lengths = [rng.randint(16, 400) for _ in range(num_requests)]
    prompts = tuple(_cyclic_slice(text_ids, rng.randrange(len(text_ids)), length) for length in lengths)
    outputs = tuple(rng.randint(8, 256) for _ in range(num_requests))
    return BenchWorkload(f"{num_requests} mixed", prompts, outputs)


def staggered(num_requests: int, text_ids: list[int]) -> BenchWorkload:
    """Return the requests of `mixed`, arriving `STEPS_BETWEEN` steps apart, so that most steps both prefill and
    decode.
    """
    workload = mixed(num_requests, text_ids)
    return replace(workload, name=f"{num_requests} staggered", steps_between=STEPS_BETWEEN)


def _cyclic_slice(text_ids: list[int], start: int, length: int) -> tuple[int, ...]:
    """Return `length` ids from index `start` on, continuing at the beginning after the end."""
    return tuple(text_ids[(start + offset) % len(text_ids)] for offset in range(length))
