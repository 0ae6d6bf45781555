"""`kvscope compare`: opens two recordings in one window, or prints or writes their key figures."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvscope_app.command_line import Options
from kvscope_app.commands.progress import ProgressBar
from kvscope_app.option_values import parse_moment
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.printable import print_line, print_text
from kvscope_telemetry.recordings.sample import named_recording

if TYPE_CHECKING:
    from kvscope_telemetry.exports.comparison.comparison import Comparison, Run


def add_compare_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help="compare two recordings side by side",
        description="Show two recordings side by side in a window: their page maps under one cursor, their"
        " curves, and a table of key figures. Without a display, print only the table. To tell differences from"
        " noise, each run is cut into 5 windows. Their variation shows how far two identical runs differ in 19 of"
        " 20 cases; each difference is compared with that.",
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="A.mcap", type=Path, help="a recording; or the word sample or sample-hybrid")
    parser.add_argument(
        "b", metavar="B.mcap", type=Path, help="the other recording; or the word sample or sample-hybrid"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--table", action="store_true", help="print the table of key figures (needs no display)")
    output.add_argument("--json", action="store_true", help="print one JSON object (units are in the names)")
    output.add_argument("--csv", metavar="FILE.csv", type=Path, help="write the table to a file (never overwrites one)")
    parser.add_argument(
        "--from", dest="from_s", metavar="S", type=parse_moment, help="start at S seconds of each recording"
    )
    parser.add_argument(
        "--until", dest="until_s", metavar="S", type=parse_moment, help="stop at S seconds of each recording"
    )
    parser.add_argument(
        "--theme", choices=("auto", "dark", "light"), help="colour theme of the window (default: as last time)"
    )
    parser.set_defaults(run=compare)
    return parser


def compare(args: argparse.Namespace) -> int | Options:
    """Print or write the table of key figures and return the exit code.

    Without an output option and with a display, return the options of a comparison window instead.
    """
    args.a, args.b = named_recording(args.a), named_recording(args.b)
    if not (args.table or args.json or args.csv):
        from kvscope_app.window.display_server import is_display_named

        if is_display_named(os.environ):
            return _window_options(args)
        print("no display: printing the table only", file=sys.stderr)
    from kvscope_app.compare.comparison_text import as_text

    comparison = _compare_runs(args)
    if args.json:
        print_text(_as_json(args, comparison))
    elif args.csv:
        _write_csv(args.csv, comparison)
        print_line(f"{args.csv}: {len(comparison.rows)} figures")
    else:
        print_text(as_text(comparison, (str(args.a), str(args.b))))
    return 0


def _compare_runs(args: argparse.Namespace) -> Comparison:
    from kvscope_telemetry.exports.comparison.comparison import compare

    return compare(_read_run(args.a, args), _read_run(args.b, args))


def _read_run(path: Path, args: argparse.Namespace) -> Run:
    from kvscope_telemetry.exports.comparison.comparison import Run
    from kvscope_telemetry.exports.span import span_of
    from kvscope_telemetry.recordings.overview import read_overview
    from kvscope_telemetry.recordings.reader import Recording

    with ProgressBar(f"reading {path.name}") as progress:
        recording = Recording.open(path)
        span = span_of(recording, args.from_s, args.until_s)
        return Run(recording, read_overview(recording, progress.report_progress), span)


def _as_json(args: argparse.Namespace, comparison: Comparison) -> str:
    import msgspec

    document = {"a_file": str(args.a), "b_file": str(args.b), **msgspec.to_builtins(comparison)}
    return msgspec.json.encode(document).decode()


def _write_csv(path: Path, comparison: Comparison) -> None:
    from kvscope_telemetry.exports.comparison.comparison_table import write_comparison_csv
    from kvscope_telemetry.exports.new_file import new_file

    with new_file(path) as file:
        write_comparison_csv(comparison, file)


def _window_options(args: argparse.Namespace) -> Options:
    if args.from_s is not None or args.until_s is not None:
        raise BadInput("--from and --until need --table, --json or --csv; in the window, select a range by hand")
    debug = bool(getattr(args, "debug", False))
    return Options(theme=args.theme, debug=debug, recordings=(str(args.a), str(args.b)), is_comparison=True)
