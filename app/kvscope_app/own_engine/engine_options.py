"""The engine's options as the desktop's command line takes them, checked, and passed on to its engine.

The desktop may not import the engine (it runs without torch), so their names, kinds and bounds are listed here;
an end-to-end test holds them against the engine's own. What only a device or a model can tell is the engine's.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from kvscope_telemetry.kv_events.config import parse_config

_SIZE: Final = re.compile(r"\d+(\.\d+)?\s*([KMGT]?i?B?)", re.IGNORECASE)


SHORT: Final = {"--tensor-parallel-size": ("-tp",)}
"""Other words for an option."""
SWITCHES: Final = {
    "--kv-disk-keep": "keep the disk tier's file at exit, for the next start",
    "--enforce-eager": "on a GPU: run without CUDA graphs (slower; starts sooner and takes less memory)",
    "--piecewise-graphs": "on a GPU: also run steps with prefills as CUDA graphs, up to 512 tokens a step",
}


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One option; `check` raises ValueError with what is accepted."""

    flag: str
    metavar: str
    help: str
    check: Callable[[str], str]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add them in one group."""
    group = parser.add_argument_group("engine", "options for the engine that the desktop starts")
    for option in ENGINE_OPTIONS:
        flags = (option.flag, *SHORT.get(option.flag, ()))
        group.add_argument(*flags, metavar=option.metavar, help=option.help, type=_typed(option))
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help=(
            "reuse cached blocks for prompts with the same prefix (default: yes, where the allocator can share blocks)"
        ),
    )
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="schedule and launch a step while the previous one runs (default: on a GPU)",
    )
    for flag, words in SWITCHES.items():
        group.add_argument(flag, action="store_true", help=words)


def engine_arguments(args: argparse.Namespace) -> list[str]:
    """The engine's command line for what was given, without what was not."""
    result: list[str] = []
    for option in ENGINE_OPTIONS:
        value: str | None = getattr(args, _dest(option.flag))
        if value is not None:
            result.append(f"{option.flag}={value}")
    for name in ("enable-prefix-caching", "async-scheduling"):
        is_on: bool | None = getattr(args, _dest(name))
        if is_on is not None:
            result.append(f"--{name}" if is_on else f"--no-{name}")
    return [*result, *(flag for flag in SWITCHES if getattr(args, _dest(flag)))]


def _typed(option: EngineOption) -> Callable[[str], str]:
    def convert(text: str) -> str:
        try:
            return option.check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not accepted: {error}") from None

    return convert


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _some(text: str) -> str:
    if not text.strip():
        raise ValueError("a name, a folder or a file")
    return text


def _one_of(*accepted: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in accepted:
            raise ValueError(f"one of {', '.join(accepted)}")
        return text

    return check


def _whole(low: int, high: int) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not re.fullmatch(r"-?\d{1,20}", text) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return text

    return check


def _share(text: str) -> str:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 1.0:
        raise ValueError("a number above 0 and at most 1")
    return text


def _gib(text: str) -> str:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1 << 20:
        raise ValueError(f"GiB, a number from 0 to {1 << 20}")
    return text


def _size(text: str) -> str:
    if not _SIZE.fullmatch(text.strip()) or not float(re.split(r"[^\d.]", text.strip())[0]):
        raise ValueError("a size such as 512MiB or 2GB")
    return text


def _object(text: str) -> str:
    """Its fields are the engine's business."""
    try:
        msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        raise ValueError("a JSON object") from None
    return text


def _kv_events(text: str) -> str:
    parse_config(text)
    return text


_MANY: Final = 1 << 31
ENGINE_OPTIONS: Final = (
    EngineOption("--model", "M", "`default`, a Hugging Face id, a folder, a .gguf file, or dummy:CONFIG.json", _some),
    EngineOption("--device", "D", "auto, cpu or cuda", _one_of("auto", "cpu", "cuda")),
    EngineOption(
        "--dtype",
        "T",
        "of weights and activations: auto, float32, bfloat16 or float16",
        _one_of("auto", "float32", "bfloat16", "float16"),
    ),
    EngineOption(
        "--quantization",
        "Q",
        "weights: auto (as in quantized files) or none (widened): same tokens; a8 (auto with 8-bit "
        "activations), int8, int4: faster on a CPU, different tokens",
        _one_of("auto", "none", "a8", "int8", "int4"),
    ),
    EngineOption(
        "--generation-config",
        "G",
        "use the model's generation config as sampling defaults: auto or none",
        _one_of("auto", "none", "vllm"),
    ),
    EngineOption(
        "--kv-cache-dtype",
        "T",
        "of the blocks: auto, fp8 (also called fp8_e4m3) or int8",
        _one_of("auto", "fp8", "fp8_e4m3", "int8"),
    ),
    EngineOption(
        "--attention-backend",
        "B",
        "attention library for prompts on a GPU: auto (the fastest installed), kvscope, flashinfer or flash-attn",
        _one_of("auto", "kvscope", "flashinfer", "flash-attn"),
    ),
    EngineOption("--block-size", "SLOTS", "tokens per block (default: 16)", _whole(1, 1024)),
    EngineOption(
        "--max-model-len",
        "TOKENS",
        "maximum tokens of prompt and output together (default: the model's)",
        _whole(1, _MANY),
    ),
    EngineOption("--max-num-seqs", "REQUESTS", "maximum requests per step (default: 64)", _whole(1, 1 << 16)),
    EngineOption(
        "--max-num-batched-tokens",
        "TOKENS",
        "maximum tokens computed per step (default: by device)",
        _whole(1, _MANY),
    ),
    EngineOption("--gpu-memory-utilization", "SHARE", "fraction of the GPU's memory to use (default: 0.9)", _share),
    EngineOption(
        "--cpu-offload-gb",
        "GIB",
        "on a GPU: GiB of weights kept in host memory and copied in each step, for larger models (default: 0)",
        _gib,
    ),
    EngineOption("--num-gpu-blocks-override", "BLOCKS", "exact number of blocks, on a CPU too", _whole(1, _MANY)),
    EngineOption("--kv-memory", "SIZE", "memory for the blocks, such as 512MiB (default: by device)", _size),
    EngineOption("--kv-host-memory", "SIZE", "host memory tier, such as 4GiB (default: none)", _size),
    EngineOption("--kv-disk", "SIZE", "disk tier, such as 32GiB (default: none)", _size),
    EngineOption("--kv-disk-path", "FILE", "file of the disk tier (default: a temporary one)", _some),
    EngineOption(
        "--preemption",
        "HOW",
        "what happens to a preempted request's blocks: auto, recompute or swap (default: auto)",
        _one_of("auto", "recompute", "swap"),
    ),
    EngineOption(
        "--allocator",
        "A",
        "allocator: paged, contiguous, buddy or virtual",
        _one_of("paged", "contiguous", "buddy", "virtual"),
    ),
    EngineOption(
        "--page-heat",
        "STEPS",
        "measure attention per block every N decode steps, for the page map (default: 0, never)",
        _whole(0, _MANY),
    ),
    EngineOption(
        "--sparse-decode",
        "FRACTION",
        "fraction of its blocks that each new token attends to (default: all; 0.25 works well)",
        _share,
    ),
    EngineOption("--seed", "N", "seed for requests without one (default: 0)", _whole(-(1 << 63), (1 << 63) - 1)),
    EngineOption(
        "--kv-events-config",
        "JSON",
        "publish KV cache events as vLLM does, with vLLM's fields (default: off)",
        _kv_events,
    ),
    EngineOption(
        "--speculative-config",
        "JSON",
        "speculative decoding by n-gram lookup, with vLLM's fields; the tokens stay the same (default: off)",
        _object,
    ),
    EngineOption("--tensor-parallel-size", "N", "split the model across N GPUs or processes", _whole(1, 1 << 10)),
    EngineOption("--num-threads", "N", "fixed number of CPU threads (default: by the cores)", _whole(1, _MANY)),
)
