"""Generates workloads from a seed: arrivals as a Poisson process or in bursts, lengths distributed as in published data
sets.

Lengths are log-normal. Their means are those of PagedAttention (SOSP'23, figure 11): ShareGPT 161 input and 338 output
tokens, Alpaca 19 and 58. The paper gives no other moment; the sigmas here (of the logarithm) are chosen for the heavy
tails in its figure. Lengths are truncated to fit into `max_model_len`, whereas the paper drops longer requests. If many
lengths are truncated, the actual means are therefore lower than the requested ones; the report shows the actual means.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, repeat
from random import Random
from typing import Final

from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest
from kvscope_telemetry.errors import BadInput

ARRIVALS: Final = ("poisson", "bursty")
BURST_SHAPE: Final = 0.25  # shape of the gamma distribution: gaps vary twice as much as those of a Poisson process
MAX_REQUESTS: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution of lengths in tokens. `mean` is the mean before truncation; `sigma` is the
    standard deviation of the logarithm.
    """

    mean: float
    sigma: float

    def sample(self, random: Random, longest: int) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(longest, max(1, round(random.lognormvariate(mu, self.sigma))))


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: LogNormal
    output: LogNormal


SHAREGPT: Final = Lengths(LogNormal(161.31, 1.2), LogNormal(337.99, 0.9))
ALPACA: Final = Lengths(LogNormal(19.31, 0.6), LogNormal(58.45, 0.9))
GENERATORS: Final = {"sharegpt": (SHAREGPT,), "alpaca": (ALPACA,), "mixed": (SHAREGPT, ALPACA)}
"""Map from each workload name to the kinds of requests in it, which are equally likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorOptions:
    """Number of requests, their arrivals and shared prefixes. Raises BadInput for a value out of range."""

    num_requests: int = 1000
    rate: float = math.inf
    """Mean number of requests per second. If infinite, all requests arrive at the start."""
    arrivals: str = "poisson"
    shared_prefix_tokens: int = 0
    """Length in tokens of the shared prefix at the start of each prompt; 0 if prompts share none."""
    num_prefixes: int = 1
    """Number of different shared prefixes. Each prompt starts with one of them; the frequency of the n-th is
    proportional to 1/n (Zipf's law).
    """
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_requests <= MAX_REQUESTS:
            raise BadInput(
                f"requests={self.num_requests} is not accepted: must be a whole number from 1 to {MAX_REQUESTS}"
            )
        if not self.rate >= 1e-6:
            raise BadInput(f"rate={self.rate} is not accepted: requests/s from 0.000001 to inf")
        if self.arrivals not in ARRIVALS:
            raise BadInput(f"arrivals={self.arrivals!r} is not accepted: must be one of {', '.join(ARRIVALS)}")
        if self.shared_prefix_tokens < 0:
            raise BadInput(f"shared_prefix={self.shared_prefix_tokens} is not accepted: 0 tokens or more")
        if not 1 <= self.num_prefixes <= MAX_REQUESTS:
            raise BadInput(
                f"num_prefixes={self.num_prefixes} is not accepted: must be a whole number from 1 to {MAX_REQUESTS}"
            )
        if self.num_prefixes > 1 and not self.shared_prefix_tokens:
            raise BadInput(f"num_prefixes={self.num_prefixes} is not accepted without a length (--shared-prefix)")


def generate(name: str, options: GeneratorOptions, max_model_len: int) -> Workload:
    """Return the workload called `name` (a key of `GENERATORS`). Equal options give equal workloads. No request is
    longer than `max_model_len`.

    Raises BadInput if the shared prefix leaves no tokens for a prompt and an output.
    """
    shared = options.shared_prefix_tokens
    max_count = max_model_len - shared
    if max_count < 2:
        raise BadInput(
            f"a shared prefix of {shared} tokens is not accepted: at most {max_model_len - 2} leave room for"
            f" a prompt and an output (max_model_len {max_model_len})"
        )
    # Separate random sources: another rate, other arrivals or prefixes do not change the lengths.
    lengths = _lengths(GENERATORS[name], Random(f"lengths {options.seed}"), max_count)
    arrivals = _arrivals(options, Random(f"arrivals {options.seed}"))
    prefixes = _prefixes(options, Random(f"prefixes {options.seed}"))
    requests = (
        WorkloadRequest(arrival_ns, shared + prompt, output, text_ids)
        for arrival_ns, (prompt, output), text_ids in zip(arrivals, lengths, prefixes, strict=False)  # all are endless
    )
    return Workload(name, tuple(islice(requests, options.num_requests)), max(1, shared))


def _lengths(kinds: tuple[Lengths, ...], random: Random, max_count: int) -> Iterator[tuple[int, int]]:
    while True:
        kind = random.choice(kinds)
        prompt = kind.prompt.sample(random, max_count - 1)
        yield prompt, kind.output.sample(random, max_count - prompt)


def _prefixes(options: GeneratorOptions, random: Random) -> Iterator[tuple[int, ...]]:
    if not options.shared_prefix_tokens:
        yield from repeat(())
    cumulative_weights = list(accumulate(1 / rank for rank in range(1, options.num_prefixes + 1)))
    while True:
        yield (bisect(cumulative_weights, random.random() * cumulative_weights[-1], hi=options.num_prefixes - 1),)


def _arrivals(options: GeneratorOptions, random: Random) -> Iterator[int]:
    """Yield arrival times in ns. The first is 0, and the mean gap is 1 / rate."""
    time_s, mean_gap_s = 0.0, 1 / options.rate
    while True:
        yield round(time_s * 1e9)
        if options.arrivals == "bursty":
            time_s += random.gammavariate(BURST_SHAPE, mean_gap_s / BURST_SHAPE) if mean_gap_s else 0.0
        else:
            time_s += random.expovariate(1.0) * mean_gap_s
