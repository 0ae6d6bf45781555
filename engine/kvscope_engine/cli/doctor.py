"""Command `kvscope-engine doctor`: reports what this machine has and lacks, how to install what is missing, and which
kernels are used.

`model.runner.operation_table` creates the table of operations.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvscope_engine.cli.machine_checks import Check, check_machine
from kvscope_telemetry.printable import print_text

if TYPE_CHECKING:
    from kvscope_kernels.operation_row import OperationChoice


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check this machine and show what is missing",
        description="Checks the machine and lists which implementation each operation runs on."
        " Exit code 0 if the engine can run on its CPU, 1 if it cannot.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the checks. Returns 0 if the engine can run here, at least on the CPU, else 1."""
    checks = check_machine()
    can_run = all(check.ok for check in checks if check.needed)
    title, operations = _operations()
    if args.json:
        report = {"can_run": can_run, "checks": checks, "operations": {"title": title, "rows": operations}}
        print(msgspec.json.encode(report).decode())
    else:
        print_text("\n".join(_line(check) for check in checks))
        print_text("\n".join(["", title, *_table(operations)]))
        print(f"\nThe engine {'can' if can_run else 'cannot'} run here.")
    return 0 if can_run else 1


def _operations() -> tuple[str, tuple[OperationChoice, ...]]:
    """Return a title and the table of operations. If the table cannot be created, it is empty and the title contains
    the reason.
    """
    try:
        from kvscope_engine.model.runner.operation_table import machine_table

        return machine_table()
    except Exception as error:  # a failure must not hide the checks, one of which suggests the fix
        return f"Operations cannot be listed: {' '.join(str(error).split())[:200] or type(error).__name__}", ()


def _table(operations: Sequence[OperationChoice]) -> list[str]:
    rows = [("operation", "implementation", "reason")]
    rows += [(row.operation, row.implementation, row.reason) for row in operations]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}" for row in rows] if operations else []


def _line(check: Check) -> str:
    mark = "ok     " if check.ok else "MISSING" if check.needed else "-      "
    mend = f"\n{'':24}mend it: {check.mend}" if check.mend and not check.ok else ""
    return f"{mark} {check.name:15} {check.detail}{mend}"
