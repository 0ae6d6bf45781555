"""The options of `kvscope bench`. Imports nothing that measures."""

from __future__ import annotations

import argparse
from typing import Any


def add_bench_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """The parser of this command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure how smoothly this machine draws the window",
        description=(
            "Runs the real window on a busy synthetic engine, or with --idle on a real idle one, and prints a table."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of the pool (default: 1000000)")
    parser.add_argument("--host-blocks", type=int, default=0, help="blocks of a host tier (default: 0, none)")
    parser.add_argument("--disk-blocks", type=int, default=0, help="blocks of a disk tier (default: 0, none)")
    parser.add_argument("--rate", type=float, default=5000.0, help="telemetry frames per second (default: 5000)")
    parser.add_argument("--seconds", type=float, help="how long to measure (default: 10; with --idle 30, each)")
    parser.add_argument("--startup-runs", type=int, default=3, help="number of desktop starts to time (default: 3)")
    parser.add_argument("--map-only", action="store_true", help="close the docked views: page map only")
    parser.add_argument(
        "--idle",
        action="store_true",
        help="measure how much of a core an idle engine and window use: default layout, paused, minimised, "
        "every view open, and a recording at rest (about five minutes)",
    )
    parser.add_argument(
        "--attach",
        metavar="ENDPOINT",
        help="with --idle: attach the windows to this engine, which should be idle (default: an engine with the "
        "default model is started and measured too)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.set_defaults(run=_run)
    return parser


def _run(args: argparse.Namespace) -> int:
    from kvscope_app.bench.bench_command import run_bench

    return run_bench(args)
