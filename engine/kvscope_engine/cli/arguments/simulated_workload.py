"""The workload of a simulation and the files of its recordings, as chosen by the options of `simulate`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvscope_engine.cli.arguments.simulate_options import DEFAULT_REQUESTS, WORKLOADS
from kvscope_engine.simulator.workloads.generators import GENERATORS, GeneratorOptions
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_engine.simulator.workload_recording import WorkloadRecording
    from kvscope_engine.simulator.workloads.workload import Workload

SUFFIXES: Final = (".mcap", ".jsonl", ".csv")
GENERATOR_ONLY: Final = ("rate", "arrivals", "shared_prefix", "num_prefixes", "seed")


def chosen_run(args: argparse.Namespace) -> WorkloadRecording | None:
    """Read the recording that is used as the workload; return None for other workloads.

    Raises BadInput for an unknown workload, for a file that is not a recording, and for a recording without requests.
    """
    _check_workload(args)
    if Path(args.workload).suffix.lower() != ".mcap":
        return None
    from kvscope_engine.simulator.workload_recording import read_workload_recording
    from kvscope_telemetry.recordings.sample import named_recording

    return read_workload_recording(named_recording(args.workload), args.requests)


def chosen_workload(args: argparse.Namespace, max_model_len: int, run: WorkloadRecording | None) -> Workload:
    from kvscope_engine.simulator.workloads.azure import read_azure
    from kvscope_engine.simulator.workloads.generators import generate
    from kvscope_engine.simulator.workloads.mooncake import read_mooncake

    if run is not None:
        return run.workload
    if args.workload in GENERATORS:
        return generate(args.workload, _generator_options(args), max_model_len)
    path = Path(args.workload)
    read = read_mooncake if path.suffix.lower() == ".jsonl" else read_azure
    return read(path, args.requests)


def _check_workload(args: argparse.Namespace) -> None:
    if args.workload in GENERATORS:
        return
    if Path(args.workload).suffix.lower() not in SUFFIXES:
        raise BadInput(f"workload {args.workload!r:.200} is not known: {WORKLOADS}")
    for name in GENERATOR_ONLY:
        if getattr(args, name) is not None:
            raise BadInput(
                f"--{name.replace('_', '-')} is not accepted with a trace or a recording:"
                f" it is for {', '.join(GENERATORS)}"
            )


def _generator_options(args: argparse.Namespace) -> GeneratorOptions:
    return GeneratorOptions(
        num_requests=DEFAULT_REQUESTS if args.requests is None else args.requests,
        rate=math.inf if args.rate is None else args.rate,
        arrivals=args.arrivals or "poisson",
        shared_prefix_tokens=args.shared_prefix or 0,
        num_prefixes=1 if args.num_prefixes is None else args.num_prefixes,
        seed=args.seed or 0,
    )


def recording_paths(args: argparse.Namespace, labels: Sequence[str]) -> list[Path]:
    """Return the path of the recording to write for each run, in order; empty without `--record`. Raises BadInput for a
    path that is in use.
    """
    if args.record is None:
        return []
    from kvscope_telemetry.recordings.mcap_file import check_path

    path, names = Path(args.record), [label.replace(", ", "-").replace(" ", "-") for label in labels]
    paths = [path] if len(names) == 1 else [path.with_stem(f"{path.stem}-{name}") for name in names]
    for each in paths:
        check_path(each)
    return paths
