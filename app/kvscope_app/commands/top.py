"""`kvscope top`: shows the state of engines on a terminal.

Decides which engines are watched and for how long; `top_screen` draws them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any, Final

from kvscope_app.access_options import add_access_options, parse_addresses
from kvscope_app.option_values import parse_duration
from kvscope_telemetry.addresses import accepted_addresses
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.transport.bind_address import default_endpoint

POLL_S: Final = 0.05
WAIT_S: Final = 5.0
MAX_ENGINES: Final = 64
"""Maximum number of engines: each has its own thread and mirror. The fleet window accepts more."""
_REQUESTS_SHOWN: Final = 10


def add_top_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "top",
        help="watch engines on a terminal",
        description="Show the pool, requests, tokens per second, latencies and device of engines on a terminal,"
        " and the requests with the most blocks. Keys: q quits; up and down, or j and k, select an"
        " engine; s changes the order of its requests (blocks, tokens, age, number).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "endpoints",
        metavar="ADDRESS",
        nargs="*",
        help=f"{accepted_addresses()}; several are shown together (default: {default_endpoint()})",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one reading as plain text and exit (default without a terminal)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one reading as a JSON object (units are in the names; unknown values are null)",
    )
    parser.add_argument(
        "--wait",
        metavar="N",
        type=parse_duration,
        default=WAIT_S,
        help=f"with --once and --json: maximum seconds to wait for engines (default: {WAIT_S:g})",
    )
    add_access_options(parser, "ADDRESS")
    parser.set_defaults(run=top)
    return parser


def top(args: argparse.Namespace) -> int:
    """Show the engines and return the exit code.

    The code is 1 if the figures were printed only once (`--once`, `--json`) and an engine could not be read, else 0.
    """
    from kvscope_app.commands.top_engine import WatchedEngine
    from kvscope_telemetry.transport.file_limit import raise_file_limit

    addresses = tuple(dict.fromkeys(parse_addresses(args, args.endpoints or [default_endpoint()], "ADDRESS")))
    if len(addresses) > MAX_ENGINES:
        raise BadInput(
            f"{len(addresses)} addresses are not accepted: at most {MAX_ENGINES}; use `kvscope fleet` for more"
        )
    with suppress(KvscopeError):
        raise_file_limit()
    prints_once = args.once or args.json or not (sys.stdin.isatty() and sys.stdout.isatty())
    with ExitStack() as stack:
        engines = [WatchedEngine(address) for address in addresses]
        for engine in engines:
            stack.callback(engine.close)
        if prints_once:
            return _print_once(engines, args.wait, as_json=args.json)
        try:
            from kvscope_app.commands.top_screen import show
        except ModuleNotFoundError as error:  # curses, which Python for Windows lacks
            raise BadInput(f"the live table needs {error.name}, which is not installed: use --once or --json") from None
        show(engines)
    return 0


def _print_once(engines: list[Any], wait_s: float, *, as_json: bool) -> int:
    import msgspec

    from kvscope_app.commands.top_lines import engine_lines, in_encoding, legend_lines, plain_text, request_lines

    deadline_s = time.monotonic() + wait_s
    while time.monotonic() < deadline_s and not all(engine.is_ready for engine in engines):
        for engine in engines:
            engine.read(limit=0)
        time.sleep(POLL_S)
    readings = [engine.read() for engine in engines]
    if as_json:
        text = msgspec.json.encode({"engines": readings}).decode()
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        blocks = [
            plain_text([*engine_lines(each, width), *request_lines(each, width, _REQUESTS_SHOWN + 2, "blocks")])
            for each in readings
        ]
        text = "\n\n".join([*blocks, plain_text(legend_lines(width))])
    print(text if as_json else in_encoding(text, sys.stdout.encoding))
    return 0 if all(each.num_running is not None for each in readings) else 1
