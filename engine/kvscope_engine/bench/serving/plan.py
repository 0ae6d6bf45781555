"""What a run of `bench serve` does, read from its options and checked: bad input is one line each."""

from __future__ import annotations

import argparse
import math
import shlex
from dataclasses import dataclass
from typing import Final

from kvscope_engine.bench.serving.codec import Codec, FolderCodec
from kvscope_engine.bench.serving.contenders import NAMES, Wanted
from kvscope_engine.bench.serving.metrics import METRICS
from kvscope_engine.bench.serving.samples import Conversations, Dataset, PrefixRepetition, Random
from kvscope_engine.bench.serving.target import Asking, address_of
from kvscope_engine.model.fetching.names import parse_model_name
from kvscope_telemetry.addresses import read_api_key
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.foreign.address import ForeignAddress
from kvscope_telemetry.goals import read_goals

MAX_PROMPTS: Final = 1_000_000
MAX_LENGTH: Final = 1 << 22
_SLACK_TOKENS: Final = 64
"""Of a context, beside prompt and answer: tokens of a chat template and special ones."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything but the servers."""

    dataset: Dataset
    num_prompts: int
    num_warmups: int
    repeats: int
    rate: float
    burstiness: float
    max_concurrency: int | None
    seed: int
    goodput_ms: dict[str, float]
    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    asking: Asking
    timeout_s: float
    ready_timeout_s: float
    codec: Codec | None
    """Of a tokenizer that was named; None: whoever knows the server's tokens."""


def plan_of(args: argparse.Namespace) -> Plan:
    """Raises BadInput."""
    default_repeats = 3 if args.base_url is None else 1
    return Plan(
        dataset=_dataset(args),
        num_prompts=_whole("--num-prompts", args.num_prompts, 1, MAX_PROMPTS),
        num_warmups=_whole("--num-warmups", args.num_warmups, 0, MAX_PROMPTS),
        repeats=_whole("--repeats", default_repeats if args.repeats is None else args.repeats, 1, 1000),
        rate=_above_zero("--request-rate", args.request_rate),
        burstiness=_above_zero("--burstiness", args.burstiness),
        max_concurrency=None
        if args.max_concurrency is None
        else _whole("--max-concurrency", args.max_concurrency, 1, MAX_PROMPTS),
        seed=_whole("--seed", args.seed, 0, 1 << 62),
        goodput_ms=read_goals(args.goodput or ()),
        metrics=_metrics(args.percentile_metrics),
        percentiles=_percentiles(args.metric_percentiles),
        asking=Asking(args.endpoint, args.ignore_eos, temperature=_temperature(args.temperature)),
        timeout_s=_finite("--timeout", args.timeout),
        ready_timeout_s=_finite("--ready-check-timeout-sec", args.ready_check_timeout_sec),
        codec=None if args.tokenizer is None else FolderCodec(args.tokenizer),
    )


def address(args: argparse.Namespace) -> ForeignAddress:
    """Of a server that runs already. Raises BadInput."""
    for name in ("only", "engine_args", "num_threads"):
        if getattr(args, name):
            raise BadInput(f"--{name.replace('_', '-')} is for servers that are started here: not with --base-url")
    ca = "" if args.tls_ca is None else str(args.tls_ca)
    return address_of(args.base_url, api_key=read_api_key(args.api_key_file), ca=ca)


def wanted(args: argparse.Namespace, dataset: Dataset) -> Wanted:
    """Of servers that are started here. Raises BadInput."""
    for name in ("api_key_file", "tls_ca", "served_model_name"):
        if getattr(args, name) is not None:
            raise BadInput(f"--{name.replace('_', '-')} goes with --base-url")
    threads = None if args.num_threads is None else _whole("--num-threads", args.num_threads, 1, 4096)
    try:
        engine_args = shlex.split(args.engine_args or "")
    except ValueError as error:
        raise BadInput(f"--engine-args {args.engine_args!r:.80} is not accepted: {error}") from None
    model = parse_model_name(args.model)
    return Wanted(model, args.device, threads, longest(dataset) + _SLACK_TOKENS, engine_args)


def names(only: list[str] | None) -> list[str]:
    """Of the contenders that take part, in their order."""
    return [name for name in NAMES if not only or name in only]


def longest(dataset: Dataset) -> int:
    """Tokens of prompt and answer together."""
    if isinstance(dataset, Random):
        drawn = math.ceil(dataset.input_len * (1 + dataset.range_ratio))
        return dataset.prefix_len + drawn + math.ceil(dataset.output_len * (1 + dataset.range_ratio))
    if isinstance(dataset, PrefixRepetition):
        return dataset.prefix_len + dataset.suffix_len + dataset.output_len
    return 2 * dataset.longest


def _dataset(args: argparse.Namespace) -> Dataset:
    if args.dataset_name == "conversations":
        return Conversations()
    if args.dataset_name == "random":
        if not 0 <= args.random_range_ratio < 1:
            raise BadInput(f"--random-range-ratio {args.random_range_ratio:g} is not accepted: from 0 to below 1")
        return Random(
            _length(args, "random_input_len"),
            _length(args, "random_output_len"),
            args.random_range_ratio,
            _length(args, "random_prefix_len", 0),
        )
    return PrefixRepetition(
        _length(args, "prefix_repetition_prefix_len", 0),
        _length(args, "prefix_repetition_suffix_len"),
        _whole("--prefix-repetition-num-prefixes", args.prefix_repetition_num_prefixes, 1, MAX_PROMPTS),
        _length(args, "prefix_repetition_output_len"),
    )


def _length(args: argparse.Namespace, name: str, least: int = 1) -> int:
    return _whole(f"--{name.replace('_', '-')}", getattr(args, name), least, MAX_LENGTH)


def _whole(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise BadInput(f"{name} {value} is not accepted: from {least} to {most}")
    return value


def _above_zero(name: str, value: float) -> float:
    if not value > 0:
        raise BadInput(f"{name} {value:g} is not accepted: a number above 0, or inf")
    return value


def _finite(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise BadInput(f"{name} {value:g} is not accepted: seconds above 0")
    return value


def _temperature(value: float) -> float:
    if not 0 <= value < math.inf:
        raise BadInput(f"--temperature {value:g} is not accepted: a number from 0")
    return value


def _metrics(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in found if name not in METRICS]:
        raise BadInput(f"--percentile-metrics {unknown[0]!r:.60} is not accepted: {', '.join(METRICS)}")
    return tuple(name for name in METRICS if name in found)


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(0 <= percentile <= 100 for percentile in found):
        raise BadInput(f"--metric-percentiles {text!r:.60} is not accepted: numbers from 0 to 100, as 90,99")
    return found
