"""`kvscope-engine bench gpu`: how near the GPU's memory speed each decoded token comes, and what starting takes.

Random weights of a configuration (Llama-3-8B's without one) or a model. For each batch: the median step with CUDA
graphs and without, beside the time that reading the weights and the batch's keys and values once takes at the speed
of a plain read measured in this run; then, with --transformers, the same batch by transformers' `generate`. With
--requests or --telemetry that is measured instead: requests that come at once, beside transformers' continuous
batching, and what a subscriber to the telemetry costs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from kvscope_engine.bench.measure import teller
from kvscope_engine.cli.parser import parse_size
from kvscope_telemetry.errors import BadInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", metavar="M", help="as for `serve` (default: random weights in Llama-3-8B's shape)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to check that it runs")
    parser.add_argument(
        "--batch", type=int, action="append", metavar="N", help="repeatable (default: 1, 16, 64; with --telemetry 64)"
    )
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="cached by each request")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="measured for each batch")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="as for `serve`")
    parser.add_argument(
        "--memory", type=parse_size, metavar="SIZE", help="limit PyTorch to this much memory, as on a smaller GPU"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="as for `serve`")
    parser.add_argument("--no-eager", action="store_true", help="skip steps without CUDA graphs")
    parser.add_argument("--turns", action="store_true", help="also measure graphs with --no-async-scheduling")
    parser.add_argument("--transformers", action="store_true", help="also measure transformers' generate")
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=(
            "run N concurrent requests (16 to 400 prompt tokens, 8 to 256 new tokens), beside transformers' "
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
    """Measure and print; 0 when all ran."""
    import torch

    _check(args)
    from kvscope_engine.bench.on_gpu.decode_steps import decode_steps
    from kvscope_engine.bench.on_gpu.requests import requests
    from kvscope_engine.bench.on_gpu.setting import setting_of
    from kvscope_engine.bench.on_gpu.telemetry import telemetry

    report: dict[str, Any] = {"device": _device_name(args.device), "torch": torch.__version__}
    tell = teller(args.json)
    with setting_of(args) as setting:
        if _has_steps(args):
            report["context"] = args.context
            report |= decode_steps(args, setting, _batches(args))
        if args.requests is not None:
            report["requests"] = requests(setting, args.requests, args.limit, tell)
        if args.telemetry:
            report["telemetry"] = telemetry(args, setting, args.batch or [64], tell)
    print(json.dumps(report) if args.json else _text(args, report))
    return 0


def _check(args: argparse.Namespace) -> None:
    import torch

    if not 0.0 < args.gpu_memory_utilization <= 1.0:
        raise BadInput(f"--gpu-memory-utilization {args.gpu_memory_utilization} is not accepted: above 0, at most 1")
    if args.context < 1 or args.steps < 1 or min(args.batch or [1]) < 1:
        raise BadInput("--context, --steps and --batch are at least 1 each")
    if args.requests is not None and args.requests < 1:
        raise BadInput(f"--requests {args.requests} is not accepted: at least 1")
    if not 0.0 < args.limit < math.inf:
        raise BadInput(f"--limit {args.limit:g} is not accepted: seconds, above 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda is not accepted: torch finds no CUDA device")


def _has_steps(args: argparse.Namespace) -> bool:
    """Whether the steps' table is asked for: by its own options, or as nothing else is."""
    return args.transformers or args.turns or not (args.requests is not None or args.telemetry)


def _batches(args: argparse.Namespace) -> list[int]:
    return args.batch or [1, 16, 64]


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _text(args: argparse.Namespace, report: dict[str, Any]) -> str:
    from kvscope_engine.bench.on_gpu.decode_steps import decode_steps_text
    from kvscope_engine.bench.on_gpu.requests import requests_text
    from kvscope_engine.bench.on_gpu.telemetry import telemetry_text

    heading = f"{report['device']}, torch {report['torch']}"
    if "context" in report:
        heading += "; " + decode_steps_text(report, _batches(args))
    parts = [heading]
    if "requests" in report:
        parts.append(requests_text(report["requests"]))
    if "telemetry" in report:
        parts.append(telemetry_text(report["telemetry"]))
    return ("\r\033[K" if sys.stderr.isatty() else "") + "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit("run it as `kvscope-engine bench gpu`")
