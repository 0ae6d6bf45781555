"""`kvscope-engine doctor`: what this machine has, what it lacks, and the command that mends it."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from kvscope_engine.cli.machine_checks import Check, check_machine
from kvscope_telemetry.printable import print_text


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """The parser of this command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check what this machine has and lacks",
        description="Checks the machine. Exit code 0 if the engine can run on its CPU, 1 if it cannot.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print what was found; 0 when the engine can run here, on the CPU at least."""
    checks = check_machine()
    can_run = all(check.ok for check in checks if check.needed)
    if args.json:
        print(msgspec.json.encode({"can_run": can_run, "checks": checks}).decode())
    else:
        print_text("\n".join(_line(check) for check in checks))
        print(f"\nThe engine {'can' if can_run else 'cannot'} run here.")
    return 0 if can_run else 1


def _line(check: Check) -> str:
    mark = "ok     " if check.ok else "MISSING" if check.needed else "-      "
    mend = f"\n{'':24}mend it: {check.mend}" if check.mend and not check.ok else ""
    return f"{mark} {check.name:15} {check.detail}{mend}"
