"""Dialog to export a session's history or a range of it, and the export itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QFormLayout,
    QVBoxLayout,
)

from kvscope_app.recording.recording_actions import Task, free_path, write_file
from kvscope_app.session.background import Background
from kvscope_app.session.recording.bookmark_file import bookmark_file, read_bookmarks
from kvscope_app.session.session import Session
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.file_dialogs import ask_save
from kvscope_app.ui.widget_factories import combo_box, label, seconds_box
from kvscope_app.ui.zoom import scaled
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.exports.kinds import FORMATS, TABLES
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.whole_file import replace_file

_FAILED: Final = "The export failed"


class _ExportFormat(NamedTuple):
    title: str
    form: str
    suffix: str
    kind: str | None
    description: str


_TABLE_FORMS: Final = {form.title: (form.name, form.suffixes[0]) for form in FORMATS if form.is_of_tables}
_FORMATS: Final = (
    *(
        _ExportFormat(form.title, form.name, form.suffixes[0], None, form.description)
        for form in FORMATS
        if not form.is_of_tables
    ),
    *(_ExportFormat(f"Table of {kind.name}", "csv", ".csv", kind.name, f"One row per {kind.row}") for kind in TABLES),
)
_END_TOLERANCE_S: Final = 0.05
"""Tolerance in seconds within which a chosen time means the timeline's start or end: half the resolution of the
fields.
"""


class ExportDialog(QDialog):
    """Export dialog of one window. Proposes the loop's range if there is one, otherwise the whole timeline."""

    def __init__(self, window: SessionWindow) -> None:
        super().__init__(window)
        session = window.session
        full_range_ns = session.timeline.range_ns
        assert full_range_ns is not None, "nothing to export"
        self._window, self._full_range_ns = window, full_range_ns
        begin_s, end_s = (self._seconds(time_ns) for time_ns in full_range_ns)
        first_s, last_s = (self._seconds(time_ns) for time_ns in session.timeline.loop.range_ns or full_range_ns)
        self.setWindowTitle("Export")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.content = combo_box([form.title for form in _FORMATS], "What")
        self.table_form = combo_box(list(_TABLE_FORMS), "Format")
        self.first = seconds_box(begin_s, end_s, first_s, "From")
        self.last = seconds_box(begin_s, end_s, last_s, "Until")
        self._description = label(look="muted", wraps=True)
        self._lay_out()
        self._show_description()

    def selection(self) -> ExportSelection:
        """Return the user's choices, with an unused file name."""
        form = _FORMATS[self.content.currentIndex()]
        name, suffix = (form.form, form.suffix) if form.kind is None else _TABLE_FORMS[self.table_form.currentText()]
        path = free_path(self._window)
        stem = path.stem if form.kind is None else f"{path.stem}-{form.kind}"
        return ExportSelection(path.with_name(stem + suffix), name, form.kind, *self._range_ns())

    def accept(self) -> None:
        selection = self.selection()
        kinds = f"{self.content.currentText()} (*{selection.path.suffix})"
        ask_save(self._window, "Export", selection.path, kinds, partial(_start_export, self._window, selection))
        super().accept()

    def _range_ns(self) -> tuple[int | None, int | None]:
        """Return the chosen start and end; None for an end of the timeline, so that data recorded meanwhile is
        included.
        """
        first_s, last_s = self.first.value(), self.last.value()
        is_first = first_s <= self._seconds(self._full_range_ns[0]) + _END_TOLERANCE_S
        is_last = last_s >= self._seconds(self._full_range_ns[1]) - _END_TOLERANCE_S
        return None if is_first else self._time_ns(first_s), None if is_last else self._time_ns(last_s)

    def _seconds(self, time_ns: int) -> float:
        """Return seconds since the start of the timeline."""
        return (time_ns - self._full_range_ns[0]) / 1e9

    def _time_ns(self, seconds: float) -> int:
        return self._full_range_ns[0] + round(seconds * 1e9)

    def _show_description(self) -> None:
        form = _FORMATS[self.content.currentIndex()]
        self._rows.setRowVisible(self.table_form, form.kind is not None)
        length_s = self.last.value() - self.first.value()
        self._save.setEnabled(length_s > 0)
        self._description.setText(
            f"{form.description}. Range: {length_s:.1f} s." if length_s > 0 else "The end is before the start."
        )

    def _lay_out(self) -> None:
        self._rows = QFormLayout()
        for title, widget in (
            ("What", self.content),
            ("Format", self.table_form),
            ("From", self.first),
            ("Until", self.last),
        ):
            self._rows.addRow(title, widget)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        self._save = buttons.addButton("Export…", QDialogButtonBox.ButtonRole.AcceptRole)
        self._save.setDefault(True)
        buttons.accepted.connect(self.accept)
        buttons.rejected.connect(self.reject)
        self.content.currentIndexChanged.connect(self._show_description)
        for number in (self.first, self.last):
            number.valueChanged.connect(self._show_description)
        column = QVBoxLayout(self)
        column.setContentsMargins(22, 20, 22, 18)
        column.setSpacing(12)
        column.addLayout(self._rows)
        column.addWidget(self._description)
        column.addWidget(buttons)
        self.setMinimumWidth(scaled(400))


def _start_export(window: SessionWindow, selection: ExportSelection, path: str) -> None:
    start_export(window, replace(selection, path=Path(path)))


@dataclass(frozen=True, slots=True)
class ExportSelection:
    """Destination, format and time range of an export.

    Times are on the wall clock, in nanoseconds since 1970. None means the start or end of the recording.
    """

    path: Path
    form: str
    """Name of the export format, as in `exports.kinds.FORMATS`."""
    kind: str | None = None
    """Name of the table to export; None for other formats."""
    from_ns: int | None = None
    until_ns: int | None = None


def start_export(window: SessionWindow, selection: ExportSelection) -> Task:
    """Start the export on a thread, with a progress dialog if it takes long. Replaces an existing file when it
    completes.
    """
    work = Background(_export_function(window.session, selection), "kvscope-export")
    return write_file(window, work, selection.path, "Exporting", "Exported to", _FAILED)


def _export_function(session: Session, selection: ExportSelection) -> Callable[[ProgressCallback], Path]:
    """Return the function that the export thread runs. Reads the session's data here, on the GUI thread."""
    handle, has_disk_history, session_bookmarks = (
        session.new_recording_handle(),
        session.disk_history is not None,
        list(session.bookmarks.shown),
    )

    def work(report_progress: ProgressCallback) -> Path:
        from kvscope_telemetry.exports.export import ExportTarget, export

        if handle is None:
            raise KvscopeError("there is no history to export")
        recording = handle.get(report_progress)
        bookmarks = (
            session_bookmarks if has_disk_history else [*read_bookmarks(bookmark_file(recording)), *session_bookmarks]
        )
        with tempfile.TemporaryDirectory(prefix=".kvscope-export-", dir=_folder(selection.path)) as folder:
            target = ExportTarget.from_path(Path(folder) / selection.path.name, selection.kind, selection.form)
            begin_s, end_s = _seconds(recording, selection.from_ns), _seconds(recording, selection.until_ns)
            export(recording, target, begin_s, end_s, report_progress, bookmarks)
            if not report_progress(1.0):
                raise OpeningCancelled
            replace_file(target.path, selection.path)
        return selection.path

    return work


def _folder(path: Path) -> Path:
    if not path.parent.is_dir():
        raise KvscopeError(f"{str(path.parent)!r} is not a folder")
    return path.parent


def _seconds(recording: Recording, time_ns: int | None) -> float | None:
    return None if time_ns is None else max((time_ns - recording.start_ns) / 1e9, 0.0)
