"""Sampling options on the command line and in prompt files, with vLLM's names; checked by SamplingParams."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvscope_engine.cli.parser import number, whole_number
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.sampling_params import SamplingParams

NAMES: Final = tuple(field.name for field in msgspec.structs.fields(SamplingParams))
DEFAULTS: Final = SamplingParams()


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add them in a group of their own; `seed` is not among them, it is an option of the engine already."""
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("--temperature", type=number, metavar="T", default=DEFAULTS.temperature, help="0 is greedy; 0 to 100")
    add("--top-p", type=number, metavar="P", default=DEFAULTS.top_p, help="above 0, at most 1; 1 keeps all")
    add("--top-k", type=whole_number, metavar="K", default=DEFAULTS.top_k, help="tokens kept; 0 keeps all")
    add("--min-p", type=number, metavar="P", default=DEFAULTS.min_p, help="share of the likeliest; 0 to 1")
    add("--n", type=whole_number, metavar="N", default=DEFAULTS.n, help="completions of each prompt, 1 to 64")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the completion; repeatable")
    add("--max-tokens", type=whole_number, metavar="TOKENS", default=DEFAULTS.max_tokens, help="at most")
    add("--min-tokens", type=whole_number, metavar="TOKENS", default=0, help="before it may stop")
    add("--presence-penalty", type=number, metavar="X", default=0.0, help="-2 to 2")
    add("--frequency-penalty", type=number, metavar="X", default=0.0, help="-2 to 2")
    add("--repetition-penalty", type=number, metavar="X", default=1.0, help="above 0, at most 10; 1 is none")
    add("--logprobs", type=whole_number, metavar="K", help="of each token and the K likeliest, 0 to 20")
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the options ask for; raises BadInput for a value outside its range."""
    values = {name: getattr(args, name) for name in NAMES}
    return SamplingParams(**values | {"stop": tuple(args.stop)})


def overridden(base: SamplingParams, options: Mapping[str, Any]) -> SamplingParams:
    """`base` with the options of a prompt file's line. Raises BadInput for an unknown name or a bad value."""
    unknown = sorted(set(options) - set(NAMES))
    if unknown:
        raise BadInput(f"option {unknown[0]!r} is not known: prompt, messages, raw, {', '.join(NAMES)}")
    values = dict(options)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    try:
        return msgspec.convert(msgspec.to_builtins(base) | values, SamplingParams)
    except msgspec.ValidationError as error:
        raise BadInput(str(error)) from None
