"""Actions of the Edit menu: undo, redo and copying table rows."""

from __future__ import annotations

from functools import partial
from typing import Final

from PySide6.QtCore import QObject
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QAbstractItemView, QApplication, QLineEdit, QPlainTextEdit, QTextEdit, QWidget

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.ui.number_text import plural
from kvscope_app.ui.table_text import as_tsv, selected_rows
from kvscope_app.window.window_body import WindowBody

EDIT: Final = "Edit"
MAX_ROWS: Final = 200_000
_NOTICE_MS: Final = 4000


def edit_actions(window: WindowBody) -> list[ActionSpec]:
    """Return the actions in menu order. Undo and Redo name the change to be undone or redone, and are enabled only if
    there is one.
    """
    return [
        ActionSpec(
            "undo",
            "Undo",
            EDIT,
            window.undo.undo,
            ("Ctrl+Z",),
            enabled=lambda: bool(window.undo.undoText()),
            text_now=lambda: f"Undo {window.undo.undoText()}".strip(),
        ),
        ActionSpec(
            "redo",
            "Redo",
            EDIT,
            window.undo.redo,
            ("Ctrl+Shift+Z", "Ctrl+Y"),
            enabled=lambda: bool(window.undo.redoText()),
            text_now=lambda: f"Redo {window.undo.redoText()}".strip(),
        ),
        ActionSpec(
            "copy_rows",
            "Copy selected rows",
            EDIT,
            partial(_copy_rows, window, is_whole=False),
            ("Ctrl+C",),
            starts_section=True,
        ),
        ActionSpec("copy_table", "Copy table", EDIT, partial(_copy_rows, window, is_whole=True), ("Ctrl+Shift+C",)),
    ]


def _copy_rows(window: WindowBody, *, is_whole: bool) -> None:
    """Copy the selected text of a focused text field, or rows of the focused table: all rows if `is_whole`, otherwise
    the selected ones.
    """
    focus = QApplication.focusWidget()
    if isinstance(focus, QLineEdit | QTextEdit | QPlainTextEdit):
        focus.copy()
        return
    table = _table_of(focus)
    if table is None:
        window.statusBar().showMessage("No focused table to copy from", _NOTICE_MS)
        return
    rows = list(range(min(table.model().rowCount(), MAX_ROWS))) if is_whole else selected_rows(table)
    if rows:
        QGuiApplication.clipboard().setText(as_tsv(table, rows))
    window.statusBar().showMessage(f"{plural(len(rows), 'row')} copied", _NOTICE_MS)


def _table_of(widget: QObject | None) -> QAbstractItemView | None:
    while widget is not None and not isinstance(widget, QAbstractItemView):
        widget = widget.parent() if isinstance(widget, QWidget) else None
    return widget
