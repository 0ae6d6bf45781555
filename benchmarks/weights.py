"""Measure how much quality is lost with weights of fewer bits.

For each --quantization: the perplexity of a text (the first 2,500 tokens or so of Edith Wharton's story "The Verdict",
Scribner's Magazine, June 1908, in the public domain), and the bytes of all weights. On a CPU, `int8` and `int4` round
activations as well. `fp8`, which the engine does not serve on a CPU, is computed by the reference implementation: the
same numbers, slowly.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from typing import Any, Final

from benchmarks.command_line import run_benchmark
from kvscope_engine.bench import kv_cache
from kvscope_engine.bench.kv_cache import printer_for, text_ids
from kvscope_engine.text_table import table
from kvscope_telemetry.engine_config import EngineConfig

FORMATS: Final = ("none", "int8", "fp8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kv_cache.add_arguments(parser, dtype="bfloat16")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    kv_cache.check_tokens(args.tokens)
    report: dict[str, Any] = {"model": args.model, "dtype": args.dtype, "formats": {}}
    for name in FORMATS:
        report["formats"][name] = _measured(args, name, report)
        gc.collect()
    plain = report["formats"]["none"]["perplexity"]
    for row in report["formats"].values():
        row["perplexity_change"] = row["perplexity"] / plain - 1.0
    print(json.dumps(report) if args.json else _text(report))
    return 0


def _measured(args: argparse.Namespace, name: str, report: dict[str, Any]) -> dict[str, Any]:
    from kvscope_engine.bench.perplexity import perplexity
    from kvscope_engine.model.layers.weight_bytes import weights_bytes
    from kvscope_engine.model.loader.model_loader import load_model
    from kvscope_engine.model.verification.ready_to_run import make_ready_to_run

    show_progress = printer_for(args)
    config = EngineConfig(model=args.model, device=args.device, dtype=args.dtype, quantization="none")
    loaded = load_model(config, lambda progress: show_progress(f"{name}: {progress.stage}"))
    make_ready_to_run(loaded.module, name)
    ids = text_ids(loaded, args.tokens)
    report["device"], report["num_text_tokens"] = loaded.device.type, len(ids)
    text_perplexity = perplexity(
        loaded, ids, "auto", lambda done: show_progress(f"{name}: {done} of {len(ids)} tokens read")
    )
    return {"perplexity": text_perplexity, "weights_bytes": weights_bytes(loaded.module)}


def _text(report: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{row['weights_bytes'] / 1e6:,.1f}",
            f"{row['perplexity']:.4f}",
            f"{100 * row['perplexity_change']:+.3f} %",
        ]
        for name, row in report["formats"].items()
    ]
    title = (
        f"model {report['model']}, {report['dtype']}, {report['device']}, {report['num_text_tokens']} tokens of text"
    )
    return f"{title}\n\n{table(['--quantization', 'MB of weights', 'perplexity', 'change'], rows)}"


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
