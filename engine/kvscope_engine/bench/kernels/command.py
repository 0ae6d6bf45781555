"""Command line of `bench kernels`: parses options, runs a measurement or tuning, and prints the result. Independent of
particular kernels.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvscope_engine.bench.kernels.report import text
from kvscope_engine.bench.measure import progress_printer
from kvscope_engine.command_parser import parse_int
from kvscope_engine.model.platforms.cpu_count import usable_cores
from kvscope_telemetry.devices.gpus import Gpus
from kvscope_telemetry.devices.host_reader import HostReader
from kvscope_telemetry.engine_config import DEVICES, DTYPES
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.program_version import program_version

if TYPE_CHECKING:
    import torch

    from kvscope_engine.bench.kernels.contest import Contest

KERNELS: Final = ("decode", "prefill", "write", "layer", "experts", "products", "copy", "forms", "draws", "heat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=DEVICES, default="auto", help="device to run on")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="data type of queries and of caches that are not 8-bit"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=KERNELS,
        help="one operation; repeatable (default: all). decode, prefill: paged attention; write: writing keys and"
        " values; layer: normalization, rotary embedding and activation; experts: mixture of experts; products: matrix"
        " products with 4- and 8-bit weights; copy: block copies; forms: token masks of structured output; draws:"
        " top-p sampling; heat: decode attention that also measures attention per block",
    )
    parser.add_argument("--rounds", type=parse_int, default=9, metavar="N", help="repetitions; medians are reported")
    parser.add_argument("--num-threads", type=parse_int, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="instead of measuring: tune tile sizes, warps and stages of the attention kernels on this GPU and "
        "save the fastest in a table that the engine reads",
    )
    parser.add_argument(
        "--table", metavar="FILE", help="with --tune: write the table to this file instead of the user's own"
    )


def run(args: argparse.Namespace) -> int:
    """Measure or tune, and print the result.

    Returns the exit code: 1 if a contender left the device unusable, else 0.
    """
    if args.rounds < 1:
        raise BadInput(f"--rounds {args.rounds} is not accepted: 1 or more")
    if args.table is not None and not args.tune:
        raise BadInput("--table goes with --tune")
    import torch

    from kvscope_engine.model.platforms.device import choose_device, choose_dtype

    device = choose_device(args.device)
    if args.num_threads is not None:
        if args.num_threads < 1:
            raise BadInput(f"--num-threads {args.num_threads} is not accepted: 1 or more")
        torch.set_num_threads(args.num_threads)
    if args.tune:
        from kvscope_engine.bench.kernels.tuning import tune

        return tune(device.type, args, progress_printer(args.json))
    report = _measure(device.type, choose_dtype(args.dtype, device), args)
    print(json.dumps(report) if args.json else text(report))
    return 1 if report["stopped"] else 0


def _measure(device: str, dtype: torch.dtype, args: argparse.Namespace) -> dict[str, Any]:
    from kvscope_engine.bench.kernels.contest import BrokenDevice
    from kvscope_engine.bench.kernels.contests import KERNELS as MAKERS
    from kvscope_engine.bench.kernels.peers import peer_versions
    from kvscope_engine.model.platforms.device import dtype_name
    from kvscope_kernels import ops_for

    show_progress = progress_printer(args.json)
    rows: list[dict[str, Any]] = []
    absent: list[dict[str, str]] = []
    reads: list[float] = []
    failure = ""
    try:
        for name in args.only or KERNELS:
            for contest in MAKERS[name](ops_for(device), device, dtype):
                show_progress(f"{contest.kernel}, {contest.case}")
                _add_results(contest, device, args.rounds, rows, absent, reads)
    except BrokenDevice as error:  # earlier measurements remain valid
        failure = str(error)
    facts = machine()
    facts["versions"] |= peer_versions()
    return {
        **facts,
        "driver": _driver(),
        "on": device,
        "dtype": dtype_name(dtype),
        "threads": _threads() if device == "cpu" else None,
        "rounds": args.rounds,
        "read_gb_per_s": sorted(reads)[len(reads) // 2] if reads else None,
        "rows": rows,
        "absent": absent,
        "stopped": failure,
    }


def _add_results(
    contest: Contest,
    device: str,
    rounds: int,
    rows: list[dict[str, Any]],
    absent: list[dict[str, str]],
    reads: list[float],
) -> None:
    from kvscope_engine.bench.kernels.contest import measured
    from kvscope_engine.bench.kernels.samplers import read_sampler, sampler_on, wait_for

    samplers = partial(sampler_on, device), read_sampler(device)
    result = measured(contest, *samplers, rounds, partial(wait_for, device))
    rows += [asdict(row) for row in result.rows]
    case = {"kernel": contest.kernel, "case": contest.case}
    absent += [{**case, "contender": name, "why": why} for name, why in result.absent.items()]
    reads.append(result.read_gb_per_s)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _driver() -> str | None:
    try:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # NVML raises a different error for each cause: not installed, no driver, no response
        return None


def machine() -> dict[str, Any]:
    """Return the date, devices, cores, load average and library versions, for the heading of a report.

    Queries NVML for GPUs.
    """
    gpus = [gpu.name for gpu in Gpus().sample() if gpu.name]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": ", ".join(gpus) or HostReader(()).sample().name,
        "gpus": gpus,
        "cores": usable_cores(),
        "load_average": os.getloadavg()[0],
        "versions": {"kvscope": program_version(), "python": platform.python_version(), **_libraries()},
    }


def _libraries() -> dict[str, str]:
    versions = {}
    for name in ("torch", "transformers", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
