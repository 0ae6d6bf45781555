"""Measure what a quantized KV cache costs in quality, and what it saves in memory.

For each --kv-cache-dtype, it reports the perplexity of a text read in chunks through the cache (about the first 2,500
tokens of Edith Wharton's story "The Verdict", Scribner's Magazine, June 1908, in the public domain), and how greedy
completions of 32 tokens to 20 prompts differ from those of `auto`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from kvscope_engine.bench.workloads import sample_text
from kvscope_engine.text_table import table
from kvscope_telemetry.engine_config import DEVICES, DTYPES, EngineConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvscope_engine.model.loaded_model import LoadedModel

KV_FORMATS = ("auto", "int8", "fp8")
NUM_PROMPTS = 20
ANSWER_TOKENS = 32
ProgressCallback = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser, dtype: str = "float32") -> None:
    parser.add_argument("--model", metavar="M", default="default", help="model to measure (default: `default`)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="device to run on")
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help="data type of weights and activations")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="read only the first N tokens of the text, at least 2 (default: all)"
    )


def run(args: argparse.Namespace) -> int:
    check_tokens(args.tokens)
    config = EngineConfig(model=args.model, device=args.device, dtype=args.dtype, enable_prefix_caching=False)
    show_progress = printer_for(args)
    report = _perplexities(config, args.tokens, show_progress)
    answers = {name: _answers(config, name, show_progress) for name in KV_FORMATS}
    for name, row in report["formats"].items():
        row |= agreement(answers["auto"], answers[name])
    print(json.dumps(report) if args.json else _text(report))
    return 0


def check_tokens(tokens: int | None) -> None:
    """Raise BadInput for fewer than two tokens, for which perplexity is undefined."""
    if tokens is not None and tokens < 2:
        raise BadInput(f"--tokens {tokens} is not accepted: must be at least 2")


def agreement(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> dict[str, float | int]:
    """Compare completions token by token with the expected ones.

    Returns the number of completions that are equal to the end, the number of all completions, and the share of
    expected tokens before each completion's first difference.
    """
    num_equal = [_num_equal(one, other) for one, other in zip(expected, found, strict=True)]
    pairs = zip(num_equal, expected, found, strict=True)
    return {
        "num_equal_answers": sum(list(one) == list(other) for _, one, other in pairs),
        "num_answers": len(num_equal),
        "equal_tokens_share": sum(num_equal) / max(1, sum(map(len, expected))),
    }


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    differences = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differences, min(len(one), len(other)))


def _perplexities(config: EngineConfig, max_tokens: int | None, show_progress: ProgressCallback) -> dict[str, Any]:
    from kvscope_engine.bench.perplexity import perplexity
    from kvscope_engine.model.loader.model_loader import load_model
    from kvscope_engine.model.platforms.device import dtype_name

    loaded = load_model(config, lambda progress: show_progress(f"{progress.stage}"))
    ids = text_ids(loaded, max_tokens)
    formats: dict[str, dict[str, Any]] = {}
    for name in KV_FORMATS:
        measured = perplexity(loaded, ids, name, _counter(show_progress, name, len(ids)))
        formats[name] = {"perplexity": measured, "bytes_per_token": _bytes_per_token(loaded, name)}
    for row in formats.values():
        row["perplexity_change"] = row["perplexity"] / formats["auto"]["perplexity"] - 1.0
    return {
        "model": loaded.info.name,
        "dtype": dtype_name(loaded.dtype),
        "device": loaded.device.type,
        "num_text_tokens": len(ids),
        "formats": formats,
    }


def text_ids(loaded: LoadedModel, max_tokens: int | None) -> list[int]:
    """Return the token ids of the sample text, limited to `max_tokens` and the model's context length.

    Raises BadInput for a model without a tokenizer.
    """
    if loaded.tokenizer is None:
        raise BadInput(f"model {loaded.info.name!r} has no tokenizer: it cannot read text")
    text = sample_text()
    return loaded.tokenizer.encode(text)[: min(max_tokens or loaded.max_model_len, loaded.max_model_len)]


def _bytes_per_token(loaded: LoadedModel, name: str) -> int:
    """Return the bytes per token of the cache's keys, values and scales in all layers."""
    from kvscope_engine.model.kv_cache.kv_storage import block_bytes, storage_dtype
    from kvscope_engine.model.verification.hook_check import check_hook

    return block_bytes([call.shape for call in check_hook(loaded.module)], 1, storage_dtype(name, loaded.dtype))


def _answers(config: EngineConfig, kv_cache_dtype: str, show_progress: ProgressCallback) -> list[tuple[int, ...]]:
    """Return the token ids of greedy completions, computed with all prompts in one batch."""
    from kvscope_engine.engine import Engine

    show_progress(f"{kv_cache_dtype}: answers {NUM_PROMPTS} prompts")
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    with Engine(dataclasses.replace(config, kv_cache_dtype=kv_cache_dtype)) as engine:
        return [tuple(completion.token_ids) for completion in engine.generate(_prompts(), sampling)]


def _prompts() -> list[str | Submit]:
    lines = files("kvscope_resources").joinpath("prompts.jsonl").read_text("utf-8").splitlines()
    return [msgspec.json.decode(line)["prompt"] for line in lines[:NUM_PROMPTS]]


def _counter(show_progress: ProgressCallback, name: str, num_tokens: int) -> Callable[[int], None]:
    return lambda done: show_progress(f"{name}: {done} of {num_tokens} tokens read")


def printer_for(args: argparse.Namespace) -> ProgressCallback:
    """Return a function that prints progress on one line of the terminal.

    The function does nothing with --json or without a terminal.
    """
    if args.json or not sys.stderr.isatty():
        return lambda line: None
    return lambda line: print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _text(report: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{row['bytes_per_token']:,}",
            f"{row['perplexity']:.4f}",
            f"{100 * row['perplexity_change']:+.3f} %",
            f"{row['num_equal_answers']} of {row['num_answers']}",
            f"{100 * row['equal_tokens_share']:.1f} %",
        ]
        for name, row in report["formats"].items()
    ]
    lines = ["\r\033[K" if sys.stderr.isatty() else ""]
    setting_text = f"model {report['model']}, {report['dtype']}, {report['device']}"
    lines.append(f"{setting_text}, {report['num_text_tokens']} tokens of text, {ANSWER_TOKENS} tokens an answer\n")
    header = ["--kv-cache-dtype", "bytes a token", "perplexity", "change", "equal answers", "equal leading tokens"]
    lines.append(table(header, rows))
    return "\n".join(lines)
