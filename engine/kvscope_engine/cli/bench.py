"""Command `kvscope-engine bench NAME`: passes the remaining arguments to `kvscope_engine.bench.NAME`.

A benchmark is a module in `kvscope_engine.bench` with `add_arguments(parser)` and `run(args) -> int`; `--json` is added
here. It is imported only when requested, so that neither `--help` nor other commands import torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from types import ModuleType
from typing import Any, Final

from kvscope_engine.command_parser import CommandParser
from kvscope_telemetry.errors import BadInput

BENCHMARKS: Final = ("decode", "gpu", "kernels", "memory", "kv-cache", "attention")


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="run a benchmark, with alternatives for comparison",
        description="Run a benchmark and print a table, or JSON with --json. Alternatives that are installed are"
        " measured in the same run.",
    )
    names = ", ".join(benchmark_names())
    parser.add_argument("name", metavar="NAME", help=f"what to measure: {names}")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="the benchmark's options (--help lists them)")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    module = _benchmark(args.name)
    parser = CommandParser(prog=f"kvscope-engine bench {args.name}", description=module.__doc__)
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    code: int = module.run(parser.parse_args(args.options))
    return code


def benchmark_names() -> list[str]:
    return [name for name in BENCHMARKS if importlib.util.find_spec(_module_name(name))]


def _module_name(name: str) -> str:
    return f"kvscope_engine.bench.{name.replace('-', '_')}"


def _benchmark(name: str) -> ModuleType:
    if name not in benchmark_names():
        raise BadInput(f"bench {name!r} is not known: one of {', '.join(benchmark_names())}")
    return importlib.import_module(_module_name(name))
