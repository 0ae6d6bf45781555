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

from kvscope_engine.cli.arguments.simulate_options import (
    WORKLOADS,
    add_cost_options,
    add_engine_options,
    add_model_options,
    add_tier_options,
    add_workload_options,
    chosen_cost,
    chosen_limits,
    chosen_preset,
    chosen_recording,
    chosen_setups,
    chosen_workload,
    recording_paths,
)
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.printable import print_text
from kvscope_telemetry.recordings.sample import path_of

if TYPE_CHECKING:
    from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
    from kvscope_engine.simulator.simulation_report import SimulationReport


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
    add_workload_options(parser.add_argument_group("workload"))
    add_engine_options(parser.add_argument_group("engine"))
    add_model_options(parser.add_argument_group("model"))
    add_tier_options(parser.add_argument_group("lower tiers"))
    add_cost_options(parser.add_argument_group("cost model"))
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from kvscope_engine.simulator.simulation import Simulation
    from kvscope_engine.simulator.simulation_report import make_report
    from kvscope_engine.simulator.simulation_report_text import report_text

    recording = chosen_recording(args)
    model, preset, note = chosen_preset(args, recording)
    limits, cost = chosen_limits(args, preset, recording), chosen_cost(args, preset)
    workload = chosen_workload(args, limits.max_model_len)
    setups = chosen_setups(args, preset, limits, cost, workload, recording)
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
    print_text(
        _json(setups[0], reports, notes) if args.json else report_text(workload, setups[0].limits, reports, notes)
    )
    return 0


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


def _json(setup: SimulationSetup, reports: list[SimulationReport], notes: list[str]) -> str:
    workload = setup.workload
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
        }
    ).decode()
