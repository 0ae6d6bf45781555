"""Measure tokens per CPU-second of kvscope, of transformers (`generate`, and its continuous batching) and of llama.cpp.

All use one thread and the default model, and run one after another in each round. The table has medians over the
rounds; ratios are computed within each round. llama.cpp takes part if llama-cpp-python is installed. No prefixes are
cached, so that each program computes every prompt completely.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from kvscope_engine.bench.long_context.rounds import LongBatch, long_rates
from kvscope_engine.bench.measure import Contender, Rate, median_rate, median_ratio, progress_printer, rates
from kvscope_engine.bench.workloads import BenchWorkload, equal, mixed, sample_text, staggered
from kvscope_engine.text_table import table
from kvscope_telemetry.engine_config import QUANTIZATIONS

Rounds = dict[str, list[Rate]]
PEERS = ("transformers", "continuous", "llama.cpp")
PARTS = ("1", "8", "32", "staggered", "4096", "telemetry")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="data type for kvscope and transformers (auto: the one that the engine chooses on this CPU)",
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default="auto",
        help="kvscope's weights: auto uses the file's own bits (same tokens as transformers); a8 also rounds "
        "activations to 8 bits, as llama.cpp does",
    )
    parser.add_argument(
        "--peer",
        action="append",
        choices=PEERS,
        help="programs to compare kvscope with; repeatable (default: all available)",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=PARTS,
        help="one part; repeatable (default: all). 1, 8: that many equal requests; 32: requests of mixed lengths,"
        " all from the start; staggered: the same requests, one added every few steps; 4096: 8 requests with contexts"
        " of 4,096 tokens; telemetry: with telemetry and without",
    )


def run(args: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    from kvscope_engine.bench.contenders.ours import OurEngine, on_one_thread
    from kvscope_engine.bench.contenders.transformers_generate import plain_default_model
    from kvscope_engine.bench.long_context.contenders import long_contenders

    ours = OurEngine(on_one_thread("default", args.dtype, args.quantization))
    parts = args.only or PARTS
    report: dict[str, Any] = {
        "dtype": str(ours.engine.components.loaded.dtype),
        "quantization": args.quantization,
        "load_average": os.getloadavg()[0],
        "workloads": {},
    }
    module = plain_default_model(ours.engine.components.loaded.dtype)
    peers, report["left_out"] = _peers(module, args.peer or PEERS)
    contenders: list[Contender] = [ours, *peers]
    for workload in _workloads(_text_ids(ours), parts):
        contender_rates = rates(contenders, workload, args.repeats, progress_printer(args.json))
        report["workloads"][workload.name] = _summary(contender_rates)
        report["overhead_share"] = ours.overhead_share
    if "4096" in parts:
        batch = LongBatch()
        contenders_of_long = long_contenders(batch, args.dtype, module)
        contender_rates = long_rates(
            contenders_of_long, batch, _text_ids(ours), args.repeats, progress_printer(args.json)
        )
        report["workloads"][batch.name] = _summary(contender_rates)
    if "telemetry" in parts:
        report["telemetry"] = _telemetry(ours, args)
    print(json.dumps(report) if args.json else _text(report))
    return 0


def _workloads(ids: list[int], wanted: Sequence[str]) -> list[BenchWorkload]:
    workloads = {"1": equal(1, ids), "8": equal(8, ids), "32": mixed(32, ids), "staggered": staggered(32, ids)}
    return [workload for name, workload in workloads.items() if name in wanted]


def _text_ids(ours: Any) -> list[int]:
    ids: list[int] = ours.engine.tokenizer.encode(sample_text())
    return ids


def _peers(module: Any, wanted: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders in `wanted` that can run on this machine. For each of the others, return the reason
    why it cannot run, by name.
    """
    from kvscope_engine.bench.contenders import llama_cpp
    from kvscope_engine.bench.contenders.transformers_continuous import TransformersContinuous
    from kvscope_engine.bench.contenders.transformers_generate import TransformersGenerate
    from kvscope_engine.model.loader.download.default_model import default_gguf

    peers: list[Contender] = [TransformersGenerate(module)] if "transformers" in wanted else []
    left_out: dict[str, str] = {}
    if "continuous" in wanted:
        continuous = TransformersContinuous(module)
        try:
            continuous.run(BenchWorkload("a trial", ((3, 4),), (2,)))
            peers.append(continuous)
        except Exception as error:
            left_out[continuous.name] = f"{type(error).__name__}: {error}"
    if "llama.cpp" not in wanted:
        return peers, left_out
    if llama_cpp.is_installed():
        peers.append(llama_cpp.LlamaCpp(default_gguf(lambda progress: None), 32, 32 * 1024))
    else:
        left_out[llama_cpp.LlamaCpp.name] = "llama-cpp-python is not installed"
    return peers, left_out


def _summary(found: Rounds) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name, rounds in found.items():
        rate = median_rate(rounds)
        ratio = median_ratio(found["kvscope"], rounds)
        summary[name] = {
            "tokens_per_cpu_second": rate.per_cpu_second,
            "tokens_per_second": rate.per_second,
            "ours_over_it": ratio,
        }
    return summary


def _telemetry(ours: Any, args: argparse.Namespace) -> dict[str, float]:
    """Measure the cost of telemetry with 8 equal prompts: frames published to an attached subscriber, compared with
    frames discarded.
    """
    from kvscope_engine.bench.telemetry_tax import telemetry_ratio

    return telemetry_ratio(ours, equal(8, _text_ids(ours)), max(5, args.repeats), progress_printer(args.json))


def _text(report: dict[str, Any]) -> str:
    rows = [
        [
            workload,
            name,
            f"{row['tokens_per_cpu_second']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            "" if name == "kvscope" else f"{row['ours_over_it']:.2f} x",
        ]
        for workload, contenders in report["workloads"].items()
        for name, row in contenders.items()
    ]
    lines = ["\r\033[K" if sys.stderr.isatty() else ""]
    setting_text = f"{report['dtype']}, quantization {report['quantization']}"
    lines.append(f"default model, {setting_text}, CPU, 1 thread, load average {report['load_average']:.1f}\n")
    lines.append(table(["requests", "", "tokens/CPU-s", "tokens/s", "ours against it"], rows))
    lines += [f"left out: {name}: {reason}" for name, reason in report["left_out"].items()]
    if "overhead_share" in report:
        share = 100 * report["overhead_share"]
        lines.append(f"\nengine work outside the forward pass, last workload: {share:.1f} % of a step")
    if "telemetry" in report:
        lines.append(f"telemetry on against off, 8 equal: {report['telemetry']['ratio']:.3f} x")
    return "\n".join(lines)
