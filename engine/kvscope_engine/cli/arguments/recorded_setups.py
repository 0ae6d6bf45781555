"""Setups for a comparison with a recording: the recorded settings, and the options of `simulate` that change them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from kvscope_engine.cli.arguments.simulate_options import add_simulation_options
from kvscope_engine.cli.arguments.simulated_engine import chosen_cost, chosen_limits, chosen_preset, chosen_setups
from kvscope_engine.command_parser import CommandParser
from kvscope_engine.simulator.simulation import SimulationSetup
from kvscope_engine.simulator.what_if.recorded_comparison import compare_with_recording
from kvscope_engine.simulator.workload_recording import WorkloadRecording, read_workload_recording
from kvscope_telemetry.messages.what_if_question import WhatIfComparison, WhatIfQuestion


def answer_question(question: WhatIfQuestion, report: Callable[[float], object]) -> WhatIfComparison:
    """Read the recording, simulate it with and without the options, and compare. Raises BadInput for options that are
    not accepted, and for a file that is no recording or has no requests.
    """
    path = Path(question.recording)
    args = _parse(path, question.options)
    return compare_with_options(read_workload_recording(path), args, report)


def compare_with_options(
    run: WorkloadRecording, args: argparse.Namespace, report: Callable[[float], object]
) -> WhatIfComparison:
    """Compare the recorded run with the setup of `args`, parsed options of `simulate`."""
    unchanged, note = _setup(_parse(Path(args.workload), []), run)
    changed, _ = _setup(args, run)
    return compare_with_recording(run, unchanged, changed, report, (note,) if note else ())


def _setup(args: argparse.Namespace, run: WorkloadRecording) -> tuple[SimulationSetup, str]:
    """Return the first setup that the options select, and a note on what the recording lacks, or ""."""
    _, preset, note = chosen_preset(args, run)
    limits, cost = chosen_limits(args, preset, run), chosen_cost(args, preset)
    return chosen_setups(args, preset, limits, cost, run.workload, run)[0], note


def _parse(path: Path, options: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(prog="kvscope-engine simulate", add_help=False)
    parser.add_argument("workload")
    add_simulation_options(parser)
    return parser.parse_args([str(path), *options])
