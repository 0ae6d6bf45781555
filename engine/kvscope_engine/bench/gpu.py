"""Measure how close decoding comes to the GPU's memory bandwidth, and how long users wait.

The model has random weights in the shape of a known model (Llama-3-8B, unless another is chosen), or is a real one. For
each batch, steps are measured with CUDA graphs, without them, and with other options of the engine. The table compares
them with the time for reading the weights and the batch's keys and values once, at the bandwidth of a plain read in
this run and at that of the data sheet. With --transformers, transformers' `generate` runs the same batch.

Other options select another measurement: --ttft the time to the first token after a cached prefix, --requests many
requests that arrive together (also with transformers' continuous batching), --telemetry the cost of a telemetry
subscriber.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from kvscope_engine.bench.measure import progress_printer
from kvscope_engine.bench.shapes import SHAPES
from kvscope_engine.bench.workloads import SAMPLINGS
from kvscope_engine.command_parser import parse_size
from kvscope_telemetry.devices.data_sheets import DATA_SHEET_GB_PER_S
from kvscope_telemetry.errors import BadInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument("--model", metavar="M", help="as for `serve`")
    measured.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        help="random weights in the shape of SmolLM2-135M, Llama-3.2-1B, Llama-3-8B or Qwen3-30B-A3B (default: 8b)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to check that it runs")
    parser.add_argument(
        "--batch",
        type=int,
        action="append",
        metavar="N",
        help="requests per step; repeatable (default: 1, 16, 64; with --telemetry 64)",
    )
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="cached tokens of each request")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="steps to measure for each batch")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="as for `serve`")
    parser.add_argument(
        "--memory", type=parse_size, metavar="SIZE", help="limit PyTorch to this much memory, as on a smaller GPU"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="as for `serve`")
    parser.add_argument(
        "--sampling",
        choices=tuple(SAMPLINGS),
        action="append",
        help="top-p: temperature 0.6, top-p 0.9; repeatable (default: greedy, and top-p too for the largest batch)",
    )
    parser.add_argument(
        "--with",
        dest="others",
        action="append",
        metavar="OPTIONS",
        help="also measure an engine with these options of `serve`, without dashes, such as quantization=int4,"
        " page-heat=16, no-piecewise-graphs or 'speculative-config={\"num_speculative_tokens\":4}'; several with spaces"
        " between; repeatable",
    )
    parser.add_argument("--no-eager", action="store_true", help="skip steps without CUDA graphs")
    parser.add_argument("--turns", action="store_true", help="also measure graphs with --no-async-scheduling")
    parser.add_argument("--transformers", action="store_true", help="also measure transformers' generate")
    parser.add_argument(
        "--ttft",
        action="store_true",
        help="time to the first token of one request: 16, 256 and 2,000 new tokens after 0, 4k and 32k cached ones",
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=(
            "run N concurrent requests (16 to 400 prompt tokens, 8 to 256 new tokens), and compare with transformers' "
            "continuous batching"
        ),
    )
    parser.add_argument(
        "--limit", type=float, default=150.0, metavar="S", help="with --requests: stop transformers after this long"
    )
    parser.add_argument(
        "--telemetry", action="store_true", help="compare steps with and without a telemetry subscriber"
    )


def run(args: argparse.Namespace) -> int:
    import torch

    _check(args)
    from kvscope_engine.bench.on_gpu.card import read_gb_per_s
    from kvscope_engine.bench.on_gpu.decode_steps import decode_steps, max_tokens_per_step, needed_model_len
    from kvscope_engine.bench.on_gpu.requests import requests
    from kvscope_engine.bench.on_gpu.setting import DEFAULT_SHAPE, engine_options, setting_of
    from kvscope_engine.bench.on_gpu.telemetry import telemetry
    from kvscope_engine.bench.on_gpu.ttft import LONGEST, ttft

    name = _device_name(args.device)
    report: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "model": args.model or f"random weights, shape {args.shape or DEFAULT_SHAPE}",
        "data_sheet_gb_per_s": DATA_SHEET_GB_PER_S.get(name),
    }
    show_progress = progress_printer(args.json)
    option_sets = {text: engine_options(text) for text in args.others or ()}
    max_step_tokens = max(max_tokens_per_step(options) for options in ({}, *option_sets.values()))
    longest = max(LONGEST if args.ttft else 0, needed_model_len(args, _batches(args), args.steps, max_step_tokens))
    try:
        with setting_of(args, longest) as setting:
            for options in option_sets.values():
                setting.engine_config(**options)  # refuses conflicting options before anything is measured
            show_progress("reads memory")
            report["read_gb_per_s"] = read_gb_per_s(args.device)
            if _has_steps(args):
                report["context"] = args.context
                decode_steps(args, setting, _batches(args), _kinds(args) | option_sets, show_progress, report)
            if args.ttft:
                report["ttft"] = ttft(setting, {"kvscope": {}} | option_sets, report["read_gb_per_s"], show_progress)
            if args.requests is not None:
                report["requests"] = requests(setting, option_sets, args.requests, args.limit, show_progress)
            if args.telemetry:
                report["telemetry"] = telemetry(args, setting, args.batch or [64], show_progress)
    except BaseException:  # interrupted, or an engine failed to start: print what was measured before
        if report.get("steps") and not args.json:
            print(_text(report))
        raise
    print(json.dumps(report) if args.json else _text(report))
    return 0


def _kinds(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the options of the engine variants that are always measured, by the name of their table row."""
    kinds: dict[str, dict[str, Any]] = {"graphs": {}}
    if args.turns:
        kinds["turns"] = {"async_scheduling": False}
    if not args.no_eager and args.device != "cpu":
        kinds["eager"] = {"enforce_eager": True}
    return kinds


def _check(args: argparse.Namespace) -> None:
    import torch

    if not 0.0 < args.gpu_memory_utilization <= 1.0:
        raise BadInput(f"--gpu-memory-utilization {args.gpu_memory_utilization} is not accepted: above 0, at most 1")
    if args.context < 1 or args.steps < 1 or min(args.batch or [1]) < 1:
        raise BadInput("--context, --steps and --batch are at least 1 each")
    if args.requests is not None and args.requests < 1:
        raise BadInput(f"--requests {args.requests} is not accepted: must be at least 1")
    if not 0.0 < args.limit < math.inf:
        raise BadInput(f"--limit {args.limit:g} is not accepted: seconds, above 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda is not accepted: torch finds no CUDA device")


def _has_steps(args: argparse.Namespace) -> bool:
    """Whether to measure decode steps: either an option asks for it, or no other measurement is selected."""
    return args.transformers or args.turns or not (args.ttft or args.requests is not None or args.telemetry)


def _batches(args: argparse.Namespace) -> list[int]:
    return args.batch or [1, 16, 64]


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _text(report: dict[str, Any]) -> str:
    from kvscope_engine.bench.on_gpu.decode_steps import decode_steps_text
    from kvscope_engine.bench.on_gpu.requests import requests_text
    from kvscope_engine.bench.on_gpu.telemetry import telemetry_text
    from kvscope_engine.bench.on_gpu.ttft import ttft_text

    parts = [f"{report['device']}, torch {report['torch']}; {report['model']}"]
    if "steps" in report:
        parts.append(decode_steps_text(report))
    for name, text in (("ttft", ttft_text), ("requests", requests_text), ("telemetry", telemetry_text)):
        if name in report:
            parts.append(text(report[name]))
    return ("\r\033[K" if sys.stderr.isatty() else "") + "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit("run it as `kvscope-engine bench gpu`")
