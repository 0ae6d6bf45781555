"""Taking a range of a recording out, into a file whose name says in which format.

Owns which formats there are, and what each needs to be read of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.marks import marks_in
from kvscope_telemetry.exports.new_file import new_file
from kvscope_telemetry.exports.perfetto.trace import write_perfetto
from kvscope_telemetry.exports.phase_spans import RequestHistory, read_request_histories
from kvscope_telemetry.exports.report.report import write_report
from kvscope_telemetry.exports.span import Exported, Span, span_of, timed_messages
from kvscope_telemetry.exports.tables.arrow_files import require_pyarrow, write_arrow, write_parquet
from kvscope_telemetry.exports.tables.csv_file import write_csv
from kvscope_telemetry.exports.tables.devices_table import devices_table
from kvscope_telemetry.exports.tables.table import Table
from kvscope_telemetry.exports.tables.tables import KINDS, bookmarks_table, events_table, metrics_table, requests_table
from kvscope_telemetry.goals import Goals
from kvscope_telemetry.recordings.overview import Overviewed, read_overview
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.session_overview import SessionOverview

TABLE_FORMATS: Final[dict[str, Callable[[Table, BinaryIO], None]]] = {
    ".csv": write_csv,
    ".parquet": write_parquet,
    ".arrow": write_arrow,
}
TRACE_FORMATS: Final = (".perfetto-trace", ".pftrace")
REPORT_FORMATS: Final = (".html",)
FORMATS: Final = (*TABLE_FORMATS, *TRACE_FORMATS, *REPORT_FORMATS)
FORMAT_NAMES: Final = {
    "perfetto": TRACE_FORMATS[0],
    "csv": ".csv",
    "parquet": ".parquet",
    "arrow": ".arrow",
    "html": REPORT_FORMATS[0],
}
"""What a person calls them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to write where. Raises BadInput for a name that says no format, or a kind that it does not say."""

    path: Path
    kind: str
    """One of `KINDS` for a table; empty for what is no table."""
    suffix: str
    """One of `FORMATS`."""

    @classmethod
    def of(cls, path: Path, kind: str | None = None, form: str | None = None) -> Wanted:
        """By the name of the file: `metrics.csv`, `last-requests.parquet`. `form`, one of `FORMAT_NAMES`, is for names
        that end in something else; then a table is of metrics unless name or `kind` say otherwise."""
        suffix = path.suffix if form is None else FORMAT_NAMES[form]
        if suffix not in FORMATS:
            raise BadInput(f"{str(path)!r} is not accepted: its name ends in one of {', '.join(FORMATS)}")
        if suffix not in TABLE_FORMATS:
            if kind is not None:
                raise BadInput(f"a kind ({kind}) goes with tables ({', '.join(TABLE_FORMATS)}), not with {suffix}")
            return cls(path, "", suffix)
        named = [word for word in KINDS if word in path.stem]
        if kind is None and len(named) != 1 and form is None:
            raise BadInput(f"{str(path)!r} has no known extension: choose one of {', '.join(KINDS)} with --to")
        if suffix != ".csv":
            require_pyarrow(suffix)
        return cls(path, kind or (named[0] if len(named) == 1 else "metrics"), suffix)


def export(
    recording: Exported,
    wanted: Wanted,
    from_s: float | None = None,
    until_s: float | None = None,
    watch: ProgressCallback | None = None,
    bookmarks: Iterable[Bookmark] = (),
    goals: Goals | None = None,
) -> None:
    """Write what is wanted of the range, with its bookmarks and `bookmarks` that are kept elsewhere; a report also
    tells who missed `goals`.

    Raises BadInput and KvscopeError in one line; then nothing is left of it.
    """
    span = span_of(recording, from_s, until_s)
    marks = marks_in(recording, span, bookmarks)
    with new_file(wanted.path) as file:
        overview = read_overview(cast(Overviewed, recording), watch)
        if wanted.kind == "bookmarks":
            TABLE_FORMATS[wanted.suffix](bookmarks_table(recording, marks, span), file)
        elif wanted.kind:
            TABLE_FORMATS[wanted.suffix](_table(recording, wanted.kind, overview, span, watch), file)
        elif wanted.suffix in TRACE_FORMATS:
            histories = read_all_request_histories(recording, overview, span, watch)
            write_perfetto(recording, overview, histories, span, file, timed_messages(recording, span, watch), marks)
        else:
            write_report(
                recording,
                overview,
                read_all_request_histories(recording, overview, span, watch),
                span,
                file,
                marks,
                goals,
            )


def _table(
    recording: Exported, kind: str, overview: SessionOverview, span: Span, watch: ProgressCallback | None
) -> Table:
    if kind == "metrics":
        return metrics_table(recording, overview, span)
    if kind == "events":
        return events_table(recording, overview, span)
    if kind == "devices":
        return devices_table(recording, timed_messages(recording, span, watch), span)
    return requests_table(recording, read_all_request_histories(recording, overview, span, watch), span)


def read_all_request_histories(
    recording: Exported, overview: SessionOverview, span: Span, watch: ProgressCallback | None
) -> list[RequestHistory]:
    """The requests of the range, with what events from before it tell of them."""
    return read_request_histories(timed_messages(recording, span, watch), overview.events)
