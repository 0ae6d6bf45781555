"""The rounds: each contender is started, warmed up, measured and ended, one after the other, so that none weighs on
another. Owns the requests: the same for all in a round, others in the next, for caches remember."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from kvscope_engine.bench.serving.client import Driven, Pace, count_tokens, drive
from kvscope_engine.bench.serving.codec import Codec, codec_of
from kvscope_engine.bench.serving.contenders import OURS, Contender
from kvscope_engine.bench.serving.metrics import Metrics, metrics
from kvscope_engine.bench.serving.plan import Plan
from kvscope_engine.bench.serving.process import free_port, process, wait_ready
from kvscope_engine.bench.serving.samples import Sample, samples
from kvscope_engine.bench.serving.target import Target, address_of, reached
from kvscope_engine.model.fetching.names import ModelName
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.foreign.address import ForeignAddress

Tell: TypeAlias = Callable[[str], None]
_WARMUP_SEED: Final = 1 << 32
"""Beside the seeds of rounds: what is measured was never asked before."""


@dataclass(frozen=True, slots=True)
class Round:
    """Of one contender."""

    metrics: Metrics
    client_cpu_share: float
    wrong_prompt_lengths: int
    """Answers whose usage tells another number of prompt tokens than was meant."""


class Requests:
    """Prompts of all rounds, made with the tokens of the first server that is reached, and when they come."""

    def __init__(self, plan: Plan, model: ModelName | None = None) -> None:
        """`model` is that of servers that are started here, whose tokenizer may lie on this machine."""
        self._plan, self._model = plan, model
        self.codec: Codec | None = None
        self._warmup: list[Sample] = []
        self._rounds: list[list[Sample]] = []

    def make(self, target: Target) -> None:
        """Once. Raises NoAnswer where the server's tokens cannot be had after all."""
        if self.codec is not None:
            return
        plan = self._plan
        codec = plan.codec or codec_of(target.address, target.model, self._model)
        self._warmup = samples(plan.dataset, codec, plan.num_warmups, _WARMUP_SEED + plan.seed)
        self._rounds = [
            samples(plan.dataset, codec, plan.num_prompts, plan.seed + round_) for round_ in range(plan.repeats)
        ]
        self.codec = codec

    def of(self, round_: int) -> tuple[list[Sample], Pace]:
        """A round's."""
        plan = self._plan
        starts = arrivals(plan.num_prompts, plan.rate, plan.burstiness, plan.seed + round_)
        return self._rounds[round_], Pace(starts, plan.max_concurrency, plan.timeout_s)

    def warmup(self) -> tuple[list[Sample], Pace]:
        """Before each measurement."""
        return self._warmup, Pace([0.0] * len(self._warmup), None, self._plan.timeout_s)


def measure(plan: Plan, requests: Requests, round_: int, target: Target, tell: Tell) -> Round:
    """One round of one server. Raises KvscopeError where its warm-up fails: nothing would be measured."""
    tell("warming up")
    requests.make(target)
    warmed = drive(target, *requests.warmup(), lambda count: None).timelines
    if warmed and all(timeline.error for timeline in warmed):
        raise KvscopeError(warmed[0].error)
    samples_, pace = requests.of(round_)
    driven = drive(target, samples_, pace, lambda count: tell(f"{count} of {plan.num_prompts} requests"))
    return _round(plan, requests, driven)


def _round(plan: Plan, requests: Requests, driven: Driven) -> Round:
    assert requests.codec is not None, "there were requests"
    count_tokens(driven.timelines, requests.codec)
    told = [one for one in driven.timelines if not one.error and one.told_prompt_tokens]
    wrong = sum(one.told_prompt_tokens != one.num_prompt_tokens for one in told) if requests.codec.is_exact else 0
    for one in told:
        one.num_prompt_tokens = one.told_prompt_tokens
    found = metrics(
        driven.timelines, driven.duration_s, percentiles=plan.percentiles, goodput_ms=plan.goodput_ms or None
    )
    return Round(found, driven.cpu_share, wrong)


@contextmanager
def running(plan: Plan, contender: Contender, tell: Tell) -> Iterator[Target]:
    """A server of its own, ended with the context. Raises KvscopeError where it does not come up."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        port = free_port()
        tell("starting")
        address = address_of(f"http://127.0.0.1:{port}")
        with process(contender.command(port, Path(folder))) as server:
            wait_ready(server, contender.name, address, plan.ready_timeout_s)
            asking = dataclasses.replace(
                plan.asking, extra=contender.extra, knows_ignore_eos=contender.knows_ignore_eos
            )
            yield reached(address, "", asking)
            server.check(contender.name, "while it was measured")


def measure_started(
    plan: Plan, model: ModelName, contenders: Sequence[Contender], tell: Tell
) -> tuple[dict[str, list[Round]], dict[str, str], Requests]:
    """Rounds by name, and why those that gave up did. Raises KvscopeError where ours does."""
    requests = Requests(plan, model)
    found: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    failed: dict[str, str] = {}
    for round_ in range(plan.repeats):
        for contender in contenders:
            if contender.name in failed:
                continue
            say = _prefixed(tell, f"round {round_ + 1} of {plan.repeats}, {contender.name}: ")
            try:
                with running(plan, contender, say) as target:
                    found[contender.name].append(measure(plan, requests, round_, target, say))
            except KvscopeError as error:
                if contender.name == OURS:
                    raise
                failed[contender.name] = str(error)
    return {name: rounds for name, rounds in found.items() if name not in failed}, failed, requests


def measure_there(plan: Plan, address: ForeignAddress, model: str, tell: Tell) -> tuple[list[Round], Target, Requests]:
    """All rounds of a server that runs already."""
    requests = Requests(plan)
    target = reached(address, model, plan.asking)
    rounds = []
    for round_ in range(plan.repeats):
        say = _prefixed(tell, f"round {round_ + 1} of {plan.repeats}: ")
        rounds.append(measure(plan, requests, round_, target, say))
    return rounds, target, requests


def _prefixed(tell: Tell, where: str) -> Tell:
    return lambda line: tell(where + line)


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When each request is sent, in seconds from the start: as vLLM's client has it. Pure.

    All at once for an infinite `rate`, else with gaps of a gamma distribution whose shape is `burstiness`.

    1 is a Poisson process, less comes in bursts, more is more even, infinite is a beat. The last comes at
    `count / rate` exactly, so that seeds differ in order and not in load.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.ones(count) if math.isinf(burstiness) else np.random.default_rng(seed).gamma(burstiness, 1.0, count)
    ends = np.cumsum(gaps)
    return [float(end) for end in ends * (count / rate / ends[-1])]
