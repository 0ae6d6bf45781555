"""Command line `kvscope-engine`: dispatches to the command, prints its errors and chooses the exit code. Imports no
torch.

Exit codes: 0 success, 1 failure at run time, 2 bad usage or input, 130 interrupted by Ctrl-C, 143 and 129 ended by
SIGTERM and SIGHUP.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from kvscope_engine.command_parser import CommandParser
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.home_folder import ensure_home
from kvscope_telemetry.printable import print_line
from kvscope_telemetry.program_version import program_version
from kvscope_telemetry.standard_streams import ready_streams
from kvscope_telemetry.termination import INTERRUPTED, exiting_on_signals

PROGRAM: Final = "kvscope-engine"
STARTED_AS: Final = "KVSCOPE_STARTED_AS"
"""Name of the environment variable with the name of the program that the user started, if that program runs
this one (`kvscope replay`).
"""
COMMANDS: Final = {
    "serve": "cli.serve",
    "http": "http.http_command",
    "dashboard": "http.dashboard_command",
    "keys": "cli.keys",
    "generate": "cli.generate",
    "bench": "cli.bench",
    "simulate": "cli.simulate",
    "plan": "cli.plan",
    "analyze": "cli.analyze",
    "what-if": "cli.what_if",
    "sample": "cli.sample_devices",
    "replay": "cli.replay",
    "doctor": "cli.doctor",
}
"""Module of each command, which must define `add_parser`. Only the module of the executed command is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. If `argv` is None, use the process's arguments and end the process."""
    try:
        with exiting_on_signals(), ready_streams():
            code = _run_catching_errors(list(sys.argv[1:] if argv is None else argv))
    except SystemExit as exit_error:
        if argv is None and isinstance(exit_error.code, int):
            _exit_quickly(exit_error.code)
        raise
    if argv is None:
        _exit_quickly(code)
    return code


def _run_catching_errors(arguments: list[str]) -> int:
    try:
        ensure_home()
        return _run(arguments)
    except KeyboardInterrupt:
        return _report_failure(arguments, "interrupted", INTERRUPTED)
    except BrokenPipeError:  # `ready_streams` handles it
        raise
    except KvscopeError as error:
        return _report_failure(arguments, str(error), error.exit_code)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "kvscope").startswith("kvscope"):
            from kvscope_engine.cli.machine_checks import INSTALL

            return _report_failure(arguments, f"{error.name} is not installed, which the engine needs: {INSTALL}", 1)
        return _report_failure(arguments, f"{type(error).__name__}: {error}", 1)


def _exit_quickly(code: int) -> None:
    """Exit immediately if torch is loaded, because its cleanup takes seconds and is not needed."""
    if "torch" in sys.modules:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser of `command` or, if that is "", of all commands. Each subparser sets `run`, a function from
    arguments to exit code.
    """
    parser = CommandParser(
        prog=_program(),
        description="LLM inference engine with a paged KV cache that publishes every change of the cache.",
    )
    parser.add_argument("--version", action="version", version=f"{_program()} {program_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name in [command] if command in COMMANDS else COMMANDS:
        command_parser = import_module(f"kvscope_engine.{COMMANDS[name]}").add_parser(commands)
        command_parser.add_argument(
            "--debug",
            action="store_true",
            help="show the traceback of an error, and what each part of an engine's start cost",
        )
    return parser


def _run(arguments: list[str]) -> int:
    args = build_parser(arguments[0] if arguments else "").parse_args(arguments)
    if args.command is None:
        raise BadInput(f"no command given: use one of {', '.join(COMMANDS)} (see `{_program()} --help`)")
    code: int = args.run(args)
    return code


def _program() -> str:
    return os.environ.get(STARTED_AS, PROGRAM)


def _report_failure(arguments: list[str], message: str, code: int) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    print_line(f"{_program()}: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
