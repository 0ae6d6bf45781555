"""`kvscope find`: lists the engines that run on this machine, or on another one, with their addresses."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvscope_telemetry.addresses import API_KEY_VARIABLE, read_api_key
from kvscope_telemetry.discovery.places import PLACES
from kvscope_telemetry.discovery.probed_ports import probed_ports
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.printable import print_line, print_text, printable

if TYPE_CHECKING:
    from kvscope_telemetry.discovery.found_engine import FoundEngine

_UNKNOWN: Final = "–"
_TITLES: Final = ("ADDRESS", "ENGINE", "MODEL", "NOTE")
_NONE_FOUND: Final = 1
"""Exit code if no engine was found."""


def add_find_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "find",
        help="list the engines that run here",
        description="List the engines on this machine with their addresses for --attach: engines of kvscope's own and"
        f" plugins by their sockets, others by a request to the usual ports ({_ports_text()}). No API key is sent."
        " The exit code is 1 if no engine was found.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "host",
        metavar="PLACE",
        nargs="?",
        default="",
        help=f"machine whose ports to ask, or {PLACES} for the engines known there (default: this machine)",
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help=f"file with the API key of a PLACE such as prometheus:// (default: ${API_KEY_VARIABLE}); never sent to"
        " ports that are searched",
    )
    parser.add_argument(
        "--port",
        metavar="N",
        type=_port,
        action="append",
        default=[],
        help="a further HTTP port to ask (repeatable)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print a JSON list of the engines")
    output.add_argument(
        "--addresses",
        action="store_true",
        help="print only the addresses that can be watched, one per line, for `kvscope fleet --command`",
    )
    parser.set_defaults(run=find)
    return parser


def find(args: argparse.Namespace) -> int:
    """Print the engines that were found and return the exit code."""
    engines = _engines(args)
    if args.json:
        print(json.dumps([asdict(engine) for engine in engines]))
    elif args.addresses:
        for engine in engines:
            if engine.can_attach:
                print_line(engine.address)
    elif engines:
        print_text(_table(engines))
    elif "://" in args.host:
        print_line(f"No engine found in {args.host}")
    else:
        where = args.host or "this machine"
        print_line(f"No engine found on {where}. Asked: ports {_ports_text(args.port)}; add others with --port N.")
    return 0 if engines else _NONE_FOUND


def _engines(args: argparse.Namespace) -> tuple[FoundEngine, ...]:
    if "://" in args.host:
        if args.port:
            raise BadInput(f"--port is for the ports of a machine, and does not go with {args.host}")
        from kvscope_telemetry.discovery.places import find_in_place

        return find_in_place(args.host, api_key=read_api_key(args.api_key_file))
    if args.api_key_file is not None:
        raise BadInput("--api-key-file is for a PLACE such as prometheus://: no key is sent to ports that are searched")
    from kvscope_telemetry.discovery.local_search import find_engines

    return find_engines(args.host, args.port)


def _table(engines: Sequence[FoundEngine]) -> str:
    rows = [_TITLES] + [
        (
            printable(engine.address),
            printable(f"{engine.engine} {engine.version}".strip()),
            printable(engine.model) or _UNKNOWN,
            printable(engine.note),
        )
        for engine in engines
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES) - 1)]
    lines = [
        "  ".join([*[cell.ljust(width) for cell, width in zip(row, widths, strict=False)], row[-1]]) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _ports_text(others: Sequence[int] = ()) -> str:
    return ", ".join(str(port) for port in dict.fromkeys([*probed_ports(), *others]))


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: a port from 1 to 65535")
    return int(text)
