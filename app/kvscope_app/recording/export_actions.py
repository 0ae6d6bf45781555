"""Action to export the history of a session for other tools."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.session_window import SessionWindow

if TYPE_CHECKING:
    from kvscope_app.recording.export_dialog import ExportDialog

_NOTICE_MS: Final = 6000


def export_actions(window: SessionWindow, group: str) -> list[ActionSpec]:
    return [
        ActionSpec(
            "export",
            "Export a report, trace or table…",
            group,
            partial(ask_export, window),
            ("Ctrl+Shift+E",),
            starts_section=True,
            tip="The session's history or a range of it: HTML report, Perfetto trace, CSV, Parquet or Arrow",
        )
    ]


def ask_export(window: SessionWindow) -> ExportDialog | None:
    """Open the export dialog. Returns None if there is no history."""
    from kvscope_app.recording.export_dialog import ExportDialog  # imported late: shortens the start

    if window.session.timeline.range_ns is None:
        window.statusBar().showMessage("No history to export yet", _NOTICE_MS)
        return None
    dialog = ExportDialog(window)
    dialog.open()
    return dialog
