"""`kvscope fleet`: shows many engines in one window, from a list of addresses that is reread periodically."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

from kvscope_app.command_line import FleetOptions, Options
from kvscope_app.option_values import parse_duration
from kvscope_telemetry.addresses import API_KEY_VARIABLE, accepted_addresses, read_api_key
from kvscope_telemetry.collectors.external_engines import each_engine
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.expanded_list import AddressText, ExpandedText
from kvscope_telemetry.fleet.fleet_list import MAX_ENTRIES, parse_list
from kvscope_telemetry.fleet.list_texts import COMMAND_S, CommandText, FileText, ListText

DEFAULT_INTERVAL_S = 10.0


def add_fleet_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "fleet",
        help="watch many engines in one table",
        description=f"Show up to {MAX_ENTRIES} engines, or ranks of engines, in a table; double-click a row to open its"
        " window. Each line of the list has an address as for --attach and optionally a name; # starts a comment.",
        allow_abbrev=False,
    )
    list_source = parser.add_mutually_exclusive_group(required=True)
    list_source.add_argument(
        "addresses",
        metavar="ADDRESS",
        nargs="*",
        default=[],
        help=f"{accepted_addresses()}; one without an instance stands for all engines that Prometheus knows",
    )
    list_source.add_argument(
        "--file", metavar="ADDRESSES.txt", type=Path, help="file with the list; reread when it changes"
    )
    list_source.add_argument(
        "--command",
        metavar='"CMD"',
        dest="list_command",
        help="command that prints the list; run without a shell (for one, use sh -c '…') and stopped after "
        f"{COMMAND_S:g} s. If it fails, the last list remains",
    )
    parser.add_argument(
        "--every",
        metavar="N",
        type=parse_duration,
        default=DEFAULT_INTERVAL_S,
        help=f"seconds between reads of the list (default: {DEFAULT_INTERVAL_S:g})",
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help=f"file with the API key for {each_engine('{name}', 'and')} servers that have no saved key (default: "
        f"${API_KEY_VARIABLE}; none if not set)",
    )
    parser.add_argument("--theme", choices=("auto", "dark", "light"), help="colour theme (default: as last time)")
    parser.set_defaults(run=fleet)
    return parser


def fleet(args: argparse.Namespace) -> Options:
    """Return the options for the fleet window. Raises BadInput if the list's file cannot be read or parsed."""
    api_key = read_api_key(args.api_key_file)
    text: ListText
    if args.list_command is not None:
        text = CommandText(args.list_command)
    else:
        text = AddressText(args.addresses) if args.addresses else FileText(args.file)
        try:
            parse_list(text.read(threading.Event()), api_key)
        except BadInput as error:
            raise BadInput(str(error) if args.addresses else f"--file: {error}") from None
    debug = bool(getattr(args, "debug", False))
    return Options(theme=args.theme, debug=debug, fleet=FleetOptions(ExpandedText(text, api_key), args.every, api_key))
