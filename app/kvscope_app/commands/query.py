"""`kvscope query`: runs an SQL query or a ready question over the tables of a recording."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, Final

from kvscope_app.commands.progress import ProgressBar
from kvscope_app.option_values import parse_moment
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.kinds import TABLES
from kvscope_telemetry.exports.query.ready_questions import QUESTIONS_BY_NAME, READY_QUESTIONS
from kvscope_telemetry.printable import print_line, print_text
from kvscope_telemetry.recordings.sample import named_recording

if TYPE_CHECKING:
    from kvscope_telemetry.exports.query.recording_database import QueryResult

_MAX_ROWS_IN_TEXT: Final = 1_000


def add_query_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    rows = ", ".join(f"{kind.name} (a row per {kind.row})" for kind in TABLES)
    parser: argparse.ArgumentParser = commands.add_parser(
        "query",
        help="query a recording with SQL",
        description=f"Query a recording with SQL, or answer a ready question. Tables: {rows}. DESCRIBE TABLE lists"
        " the columns of a table. Needs DuckDB (pip install 'kvscope[query]'). A query reads only the recording: it"
        " has no access to other files, the network or extensions. DuckDB uses at most 1 GB of memory; the"
        " result is held in memory, too.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE.mcap", type=Path, help="a recording; or the word sample or sample-hybrid")
    parser.add_argument(
        "query",
        metavar="QUERY",
        help='a SELECT statement, such as "select * from requests"; the name of a ready question (--list); or - to'
        " read the statement from standard input",
    )
    parser.add_argument("--list", action=_ListQuestions, nargs=0, help="print the ready questions with their SQL")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print a JSON array with an object per row")
    output.add_argument(
        "--csv", metavar="FILE.csv", type=Path, help="write a new CSV file; - for standard output (never overwrites)"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=_parse_limit,
        help=f"maximum number of rows (default: {_MAX_ROWS_IN_TEXT:,} in the table on the terminal, otherwise all)",
    )
    parser.add_argument(
        "--from", dest="from_s", metavar="S", type=parse_moment, help="seconds from the recording's start"
    )
    parser.add_argument(
        "--until", dest="until_s", metavar="S", type=parse_moment, help="seconds from the recording's start"
    )
    parser.set_defaults(run=query)
    return parser


def query(args: argparse.Namespace) -> int:
    result = _run(args, _sql(args.query))
    if args.json:
        _print_json(result)
    elif args.csv is not None:
        _write_csv(args.csv, result)
    else:
        _print_table(result)
    return 0


def _run(args: argparse.Namespace, sql: str) -> QueryResult:
    from kvscope_app.session.recording.bookmark_file import bookmark_file, read_bookmarks
    from kvscope_telemetry.exports.query.recording_database import RecordingDatabase, require_duckdb
    from kvscope_telemetry.recordings.reader import Recording

    require_duckdb()
    is_text = not args.json and args.csv is None
    limit = _MAX_ROWS_IN_TEXT if args.limit is None and is_text else args.limit
    with ProgressBar("reading") as progress:
        recording = Recording.open(named_recording(args.file))
        bookmarks = read_bookmarks(bookmark_file(recording))
        with RecordingDatabase(
            recording, args.from_s, args.until_s, progress.report_progress, bookmarks=bookmarks
        ) as database:
            return database.query(sql, limit)


def _sql(text: str) -> str:
    """Return the SQL of a command-line argument: a ready question's, standard input's, or the argument itself."""
    if text == "-":
        return sys.stdin.read()
    if text in QUESTIONS_BY_NAME:
        return QUESTIONS_BY_NAME[text].sql
    if text.strip() and not text.replace("-", "").isalpha():
        return text
    raise BadInput(
        f"{text!r:.60} is not accepted: a query is a SELECT statement or a ready question:"
        f" {', '.join(QUESTIONS_BY_NAME)}"
    )


class _ListQuestions(argparse.Action):
    """Prints the ready questions and exits, as `--help` does: it needs no other argument."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        texts = (f"{each.name}: {each.title}\n\n{indent(each.sql, '    ')}" for each in READY_QUESTIONS)
        print_text("\n\n".join(texts))
        parser.exit()


def _print_table(result: QueryResult) -> None:
    from kvscope_telemetry.exports.query.result_formats import as_text

    print_text(as_text(result) if result.rows else "no rows")
    if result.has_more:
        print_line(f"only the first {len(result.rows):,} rows are shown; --limit shows more, --csv writes all")


def _print_json(result: QueryResult) -> None:
    from kvscope_telemetry.exports.query.result_formats import json_lines

    for line in json_lines(result):
        print(line)


def _write_csv(path: Path, result: QueryResult) -> None:
    from kvscope_telemetry.exports.new_file import is_stream, new_file
    from kvscope_telemetry.exports.query.result_formats import as_table
    from kvscope_telemetry.exports.tables.csv_file import write_csv

    with new_file(path) as file:
        write_csv(as_table(result), file)
    if not is_stream(path):
        print_line(f"{path}: {len(result.rows):,} rows")


def _parse_limit(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000_000:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: a number of rows, 1 or more")
    return int(text)
