"""Exports a range of a recording to a file in the format given by its name.

Owns the interpretation of file names. `kinds` defines the formats and tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.content import Content
from kvscope_telemetry.exports.exported_bookmarks import bookmarks_in
from kvscope_telemetry.exports.kinds import FORMATS, TABLE_NAMES, TABLES
from kvscope_telemetry.exports.new_file import new_file
from kvscope_telemetry.exports.perfetto.trace import write_perfetto
from kvscope_telemetry.exports.report.report import write_report
from kvscope_telemetry.exports.span import span_of
from kvscope_telemetry.exports.tables.arrow_files import require_pyarrow
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.slo import Goals
from kvscope_telemetry.summaries.bookmark import Bookmark

_BY_NAME: Final = {form.name: form for form in FORMATS}
SUFFIXES: Final = {suffix: form for form in FORMATS for suffix in form.suffixes}
TABLE_FORMATS: Final = {suffix: form.writer() for suffix, form in SUFFIXES.items() if form.is_of_tables}
TRACE_FORMATS: Final = _BY_NAME["perfetto"].suffixes
REPORT_FORMATS: Final = _BY_NAME["html"].suffixes


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """Table or format to write, and its path.

    Raises BadInput for a name without a known format, or a table kind that does not go with the format.
    """

    path: Path
    kind: str
    """Table to write, one of `TABLE_NAMES`; "" for formats without tables."""
    suffix: str
    """File extension, one of `SUFFIXES`."""

    @classmethod
    def from_path(cls, path: Path, kind: str | None = None, form: str | None = None) -> ExportTarget:
        """Return the target for a file name such as `requests.csv` or `last-events.parquet`.

        Args:
            kind: Table to write. Default: the table that the file name contains, or else metrics.
            form: Name of a format, which overrides the file name's extension.
        """
        suffix = path.suffix.lower() if form is None else _BY_NAME[form].suffixes[0]
        if suffix not in SUFFIXES:
            raise BadInput(f"{str(path)!r} is not accepted: its name ends in one of {', '.join(SUFFIXES)}")
        if suffix not in TABLE_FORMATS:
            if kind is not None:
                raise BadInput(f"a kind ({kind}) goes with tables ({', '.join(TABLE_FORMATS)}), not with {suffix}")
            return cls(path, "", suffix)
        named_kinds = [word for word in TABLE_NAMES if word in path.stem]
        if kind is None and len(named_kinds) > 1:
            raise BadInput(f"{str(path)!r} names several tables: choose one of {', '.join(named_kinds)} with --kind")
        if SUFFIXES[suffix].needs_pyarrow:
            require_pyarrow(suffix)
        return cls(path, kind or (named_kinds[0] if named_kinds else "metrics"), suffix)


def export(
    recording: Recording,
    target: ExportTarget,
    from_s: float | None = None,
    until_s: float | None = None,
    watch: ProgressCallback | None = None,
    bookmarks: Iterable[Bookmark] = (),
    goals: Goals | None = None,
) -> None:
    """Write the export of a range, with the recording's bookmarks and additional `bookmarks`. A report also lists the
    requests that missed `goals`.

    Raises:
        BadInput: The range is empty, or the path is not usable.
        KvscopeError: The disk is full. The file is removed.
    """
    span = span_of(recording, from_s, until_s)
    marks = bookmarks_in(recording, span, bookmarks)
    with new_file(target.path) as file:
        overview = read_overview(recording, watch)
        content = Content(recording, overview, span, marks, watch)
        if target.kind:
            table = next(kind for kind in TABLES if kind.name == target.kind).table(content)
            TABLE_FORMATS[target.suffix](table, file)
        elif target.suffix in TRACE_FORMATS:
            write_perfetto(recording, overview, content.histories(), span, file, content.messages(), marks)
        else:
            write_report(recording, overview, content.histories(), span, file, marks, goals)
