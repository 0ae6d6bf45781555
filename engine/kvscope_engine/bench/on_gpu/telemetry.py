"""Measures decode steps with frames sent to a subscriber in another process, and with frames discarded.

Both are measured on one engine and one running batch. Telemetry is on, off, off, and on again, for a few steps each, so
that the growing context has the same mean length with and without telemetry. Steps are timed by wall clock.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, Final

from kvscope_engine.bench.contenders.ours import OurEngine
from kvscope_engine.bench.on_gpu.decode_steps import decoding, needed_model_len, step_ms
from kvscope_engine.bench.on_gpu.setting import Setting, free_unused_memory
from kvscope_engine.bench.telemetry_tax import attached_subscriber
from kvscope_engine.text_table import table
from kvscope_telemetry.messages.telemetry import TelemetryMessage

PAIRS: Final = 5
CONSECUTIVE_STEPS: Final = 8
Publish = Callable[[TelemetryMessage], None]


def telemetry(
    args: argparse.Namespace, setting: Setting, batches: list[int], show_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Return each batch's median step times with and without telemetry, their ratio, and the ratio of each pair of
    steps.
    """
    max_model_len = needed_model_len(args, batches, PAIRS * len(_order(args.steps)))
    show_progress("kvscope starts")
    ours = OurEngine(setting.engine_config(max_num_seqs=max(batches), max_model_len=max_model_len))
    figures_of_batch = {}
    with ours.engine, attached_subscriber() as publish:
        for batch in batches:
            show_progress(f"telemetry, batch {batch}")
            with decoding(ours.engine, batch, args, max_model_len):
                figures_of_batch[str(batch)] = _compared([_pair(ours, publish, args.steps) for _ in range(PAIRS)])
    del ours
    free_unused_memory()
    return {"context": args.context, "batches": figures_of_batch}


def telemetry_text(report: dict[str, Any]) -> str:
    rows = [
        [
            batch,
            f"{row['with_ms']:.2f}",
            f"{row['without_ms']:.2f}",
            f"{row['ratio']:.3f} x",
            " ".join(f"{ratio:.3f}" for ratio in row["pairs"]),
        ]
        for batch, row in report["batches"].items()
    ]
    heading = f"telemetry to a subscriber in another process, against frames thrown away; context {report['context']}"
    return heading + "\n" + table(("batch", "with, ms", "without, ms", "with/without", "of each pair"), rows)


def _order(num_steps: int) -> list[bool]:
    """Return, for each step, whether telemetry is on. It is on for at least `num_steps` steps and off for the same
    number.
    """
    num_consecutive = min(CONSECUTIVE_STEPS, -(-num_steps // 2))
    sequence = [is_on for is_on in (True, False, False, True) for _ in range(num_consecutive)]
    return sequence * -(-num_steps // (2 * num_consecutive))


def _pair(ours: OurEngine, publish: Publish, num_steps: int) -> dict[bool, list[float]]:
    step_times_ms: dict[bool, list[float]] = {True: [], False: []}
    for is_on in _order(num_steps):
        ours.publish_to(publish if is_on else None)
        step_times_ms[is_on].append(step_ms(ours.engine))
    ours.publish_to(None)
    return step_times_ms


def _compared(pairs: list[dict[bool, list[float]]]) -> dict[str, Any]:
    with_ms, without_ms = (statistics.median(ms for pair in pairs for ms in pair[is_on]) for is_on in (True, False))
    ratios = [statistics.median(pair[True]) / statistics.median(pair[False]) for pair in pairs]
    return {"with_ms": with_ms, "without_ms": without_ms, "ratio": with_ms / without_ms, "pairs": ratios}
