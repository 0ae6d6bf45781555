"""Sampling options on the command line and in prompt files, with vLLM's names. `SamplingParams` validates them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvscope_engine.cli.arguments import structured_output_options
from kvscope_engine.command_parser import number, parse_int
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.sampling_params import SamplingParams

NAMES: Final = tuple(field.name for field in msgspec.structs.fields(SamplingParams))
DEFAULTS: Final = SamplingParams()


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options as a group. `seed` is not included, because it is an engine option."""
    group = parser.add_argument_group(
        "sampling",
        "Defaults of temperature, top-p, top-k, min-p and repetition penalty come from the model's"
        " generation config (see --generation-config), else they are 1, 1, 0, 0 and 1.",
    )
    add = group.add_argument
    add("--temperature", type=number, metavar="T", help="sampling temperature, 0 (greedy) to 100")
    add(
        "--top-p",
        type=number,
        metavar="P",
        help="sample from the most likely tokens with this total probability, above 0 to 1 (all)",
    )
    add("--top-k", type=parse_int, metavar="K", help="sample from the K most likely tokens (0: all)")
    add(
        "--min-p",
        type=number,
        metavar="P",
        help="drop tokens less likely than this share of the most likely one, 0 to 1",
    )
    add("--n", type=parse_int, metavar="N", default=DEFAULTS.n, help="completions per prompt, 1 to 64")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the completion at this text; repeatable")
    add(
        "--max-tokens",
        type=parse_int,
        metavar="TOKENS",
        default=DEFAULTS.max_tokens,
        help="maximum number of new tokens",
    )
    add("--min-tokens", type=parse_int, metavar="TOKENS", default=0, help="minimum number of new tokens")
    add("--presence-penalty", type=number, metavar="X", default=0.0, help="penalize tokens that occurred, -2 to 2")
    add("--frequency-penalty", type=number, metavar="X", default=0.0, help="penalize tokens per occurrence, -2 to 2")
    add(
        "--repetition-penalty",
        type=number,
        metavar="X",
        help="divide the logits of repeated tokens by X, above 0 to 10 (1: off)",
    )
    add(
        "--logprobs",
        type=parse_int,
        metavar="K",
        help="report log-probabilities of each token and the K most likely ones, 0 to 20",
    )
    add(
        "--prompt-logprobs",
        type=parse_int,
        metavar="K",
        help="with --json, report log-probabilities of the prompt's tokens and the K most likely ones, 0 to 20",
    )
    add("--ignore-eos", action="store_true", help="continue after an end-of-sequence token")
    add(
        "--stop-token-ids",
        type=_token_ids,
        metavar="ID,ID",
        default=(),
        help="end the completion at these tokens (default: none)",
    )
    add(
        "--logit-bias",
        type=_biases,
        metavar="ID:X,ID:X",
        default={},
        help="add X, -100 to 100, to the logit of token ID (default: none)",
    )
    structured_output_options.add_structured_output_options(parser)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    values = {name: getattr(args, name) for name in NAMES if name != "structured"}
    return SamplingParams(
        **values | {"stop": tuple(args.stop), "structured": structured_output_options.structured(args)}
    )


def with_line_options(base: SamplingParams, options: Mapping[str, Any]) -> SamplingParams:
    """Return `base` with the options of a prompt file's line. Raises BadInput for an unknown name or an invalid
    value.
    """
    known = (*NAMES, *structured_output_options.NAMES)
    unknown = sorted(set(options) - set(known))
    if unknown:
        accepted = ", ".join(("prompt", "messages", "raw", "priority", "cache_salt", "adapter", "tools", *known))
        raise BadInput(f"option {unknown[0]!r} is not known: {accepted}")
    values = {name: value for name, value in options.items() if name not in structured_output_options.NAMES}
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    structured = structured_output_options.structured_from_options(options)
    if structured is not None:
        values["structured"] = msgspec.to_builtins(structured)
    try:  # token ids are strings as keys of JSON
        merged = msgspec.to_builtins(base, str_keys=True) | values
        return msgspec.convert(merged, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise BadInput(str(error)) from None


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(parse_int(part) for part in text.split(","))


def _biases(text: str) -> dict[int, float]:
    pairs = [part.partition(":") for part in text.split(",")]
    return {parse_int(token): number(bias) for token, _, bias in pairs}
