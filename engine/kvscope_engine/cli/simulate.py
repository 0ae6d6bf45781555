"""Command `kvscope-engine simulate WORKLOAD`: runs scheduler and block pool without a model, and compares allocators.

Nothing is printed before all simulations have run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvscope_engine.cli.arguments.simulate_options import WORKLOADS, add_simulation_options
from kvscope_engine.cli.arguments.simulated_engine import chosen_cost, chosen_limits, chosen_preset, chosen_setups
from kvscope_engine.cli.arguments.simulated_workload import chosen_run, chosen_workload, recording_paths
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.printable import print_text
from kvscope_telemetry.recordings.sample import path_of

if TYPE_CHECKING:
    from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
    from kvscope_engine.simulator.simulation_report import SimulationReport
    from kvscope_engine.simulator.workload_recording import WorkloadRecording
    from kvscope_telemetry.messages.what_if_question import WhatIfComparison


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate",
        help="simulate scheduler and block pool without a model",
        description="Run a workload through the engine's scheduler and block pool on a simulated clock, with one"
        " or more allocators. Prints tables, or JSON with --json.",
    )
    parser.add_argument("workload", metavar="WORKLOAD", type=path_of, help=WORKLOADS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--record",
        metavar="FILE.mcap",
        help="record the simulated run for the desktop; with several allocators, the name of each is"
        " inserted before the suffix. At most one waiting request more than --max-num-seqs is shown",
    )
    parser.add_argument(
        "--measured",
        action="store_true",
        help="compare the recorded figures with simulations of the recorded settings and of the first allocator with"
        " the other options (recordings only)",
    )
    add_simulation_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from kvscope_engine.simulator.simulation import Simulation
    from kvscope_engine.simulator.simulation_report import make_report
    from kvscope_engine.simulator.simulation_report_text import report_text

    recorded = chosen_run(args)
    model, preset, note = chosen_preset(args, recorded)
    limits, cost = chosen_limits(args, preset, recorded), chosen_cost(args, preset)
    workload = chosen_workload(args, limits.max_model_len, recorded)
    setups = chosen_setups(args, preset, limits, cost, workload, recorded)
    simulations, notes = list[Simulation](), [note] if note else []
    for setup in setups:  # all are created, and thereby checked, before the first runs
        try:
            simulations.append(Simulation(setup))
        except BadInput as error:
            if setup.allocator != "virtual" or "virtual" in args.allocator:
                raise
            notes.append(f"virtual is left out: {error}")  # it was selected only by "all"
    setups = [simulation.setup for simulation in simulations]
    paths: Sequence[Path | None] = recording_paths(args, [setup.label for setup in setups]) or [None] * len(setups)
    _run_all([_Run(*one) for one in zip(setups, simulations, paths, strict=True)], args.model or model)
    reports = [make_report(simulation) for simulation in simulations]
    if not any(one.num_finished for one in reports):
        raise BadInput(f"no request of {workload.name!r} can be served: {reports[0].first_refusal}")
    comparison = _compare(args, recorded) if args.measured else None
    if args.json:
        print_text(_json(setups[0], reports, notes, comparison))
    else:
        from kvscope_engine.simulator.what_if.comparison_text import comparison_text

        text = report_text(workload, setups[0].limits, reports, notes)
        print_text(text if comparison is None else f"{text}\n\n{comparison_text(comparison)}")
    return 0


def _compare(args: argparse.Namespace, recorded: WorkloadRecording | None) -> WhatIfComparison:
    if recorded is None:
        raise BadInput(f"--measured is not accepted with {args.workload!r:.200}: only a recording has measured figures")
    from kvscope_engine.cli.arguments.recorded_setups import compare_with_options
    from kvscope_engine.model.loader.download.progress import Meter, TerminalProgress

    bar = TerminalProgress()
    try:
        with Meter(bar, "simulate", "measured", 100, "%") as meter:
            return compare_with_options(recorded, args, lambda share: meter.reach(round(100 * share), 100))
    finally:
        bar.close()


@dataclass(frozen=True, slots=True)
class _Run:
    setup: SimulationSetup
    simulation: Simulation
    recording: Path | None


def _run_all(runs: Sequence[_Run], model: str) -> None:
    from kvscope_engine.model.loader.download.progress import Meter, TerminalProgress

    bar = TerminalProgress()
    try:
        for run in runs:
            simulation, total = run.simulation, run.simulation.num_requests
            with (
                Meter(bar, "simulate", simulation.allocator, total, "requests") as meter,
                _recording_context(run, model),
            ):
                while simulation.advance():
                    meter.reach(simulation.tally.num_ended, total)
    finally:
        bar.close()


def _recording_context(run: _Run, model: str) -> AbstractContextManager[object]:
    if run.recording is None:
        return nullcontext()
    from kvscope_engine.simulator.simulation_recording import SimulationRecording

    return SimulationRecording(run.simulation, run.setup, run.recording, model)


def _json(
    setup: SimulationSetup, reports: list[SimulationReport], notes: list[str], comparison: WhatIfComparison | None
) -> str:
    workload = setup.workload
    measured = {} if comparison is None else {"comparison": comparison, "errors": comparison.errors}
    return msgspec.json.encode(
        {
            "workload": {
                "name": workload.name,
                "num_requests": len(workload.requests),
                "mean_prompt_tokens": workload.mean_prompt_tokens,
                "mean_output_tokens": workload.mean_output_tokens,
            },
            "limits": setup.limits,
            "tiers": setup.tiers,
            "cost_model": setup.cost,
            "policies": reports,
            "notes": notes,
            **measured,
        }
    ).decode()
