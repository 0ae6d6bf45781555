"""Validated settings of the load generator, and requests made from them. Imports no Qt."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvscope_app.load_generator.sample_prompts import long_prompts, short_prompts
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

MAX_CONCURRENCY: Final = 512
MAX_RATE: Final = 100.0
MAX_OUTPUT_TOKENS: Final = 4096


class Pace(StrEnum):
    CONCURRENCY = "Concurrency"
    """Keeps the number of unfinished requests constant."""
    RATE = "Request rate"
    """Submits requests as a Poisson process with mean rate `LoadSettings.rate`."""


class Mix(StrEnum):
    SHORT = "Short prompts"
    LONG = "Long prompts"
    MIXED = "Short and long"
    SHARED = "Shared prefix"
    """Prompts that begin with the same long text, followed by varying questions, so that a prefix cache helps."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Settings of a load. Raises BadInput for a value outside its range."""

    pace: Pace = Pace.CONCURRENCY
    concurrency: int = 16
    rate: float = 2.0
    """Mean requests per second."""
    mix: Mix = Mix.MIXED
    min_output_tokens: int = 32
    max_output_tokens: int = 256
    adapters: tuple[str, ...] = ("",)
    """Names of LoRA adapters; each request uses a random one of them. An empty name is the base model."""

    def __post_init__(self) -> None:
        _check_range("concurrent requests", self.concurrency, 1, MAX_CONCURRENCY)
        _check_range("requests per second", self.rate, 0.1, MAX_RATE)
        _check_range("minimum output tokens", self.min_output_tokens, 1, MAX_OUTPUT_TOKENS)
        _check_range("maximum output tokens", self.max_output_tokens, self.min_output_tokens, MAX_OUTPUT_TOKENS)


def make_request(settings: LoadSettings, prompts: tuple[str, ...], request_id: str, rng: random.Random) -> Submit:
    num_tokens = rng.randint(settings.min_output_tokens, settings.max_output_tokens)
    # ignore_eos makes the output as long as requested, even if the model would stop earlier.
    sampling = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=num_tokens, ignore_eos=True)
    prompt, adapter = _prompt(settings.mix, prompts, rng), rng.choice(settings.adapters)
    return Submit(request_id=request_id, prompt=prompt, sampling=sampling, adapter=adapter)


def _prompt(mix: Mix, prompts: tuple[str, ...], rng: random.Random) -> str:
    short, long = short_prompts(prompts), long_prompts(prompts)
    if mix is Mix.SHARED:
        return f"{long[0]}\n\nOne more question: {rng.choice(short)}"
    candidates = {Mix.SHORT: short, Mix.LONG: long, Mix.MIXED: prompts}[mix]
    # A number in front keeps equal prompts of the other mixes from sharing prefix-cached blocks.
    return f"({rng.randint(1, 999_999)}) {rng.choice(candidates)}"


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadInput(f"{name}: {value:g} is not accepted, from {low:g} to {high:g}")
