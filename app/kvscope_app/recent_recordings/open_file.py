"""Asks for a recording and opens it in its own window. The banner reports files that cannot be opened.

The window stays responsive. If opening takes long, a small dialog shows the progress and can cancel it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QProgressDialog

from kvscope_app.playback.file_opening import FileOpening
from kvscope_app.recent_recordings.recent_files import recording_folder
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.file_dialogs import ask_open

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.reader import Recording

FILES: Final = "Recordings (*.mcap *.mcap.part);;All files (*)"
_DIALOG_DELAY_MS: Final = 500
_STEPS: Final = 1000


def ask_file(window: SessionWindow) -> None:
    folder = str(recording_folder(window.themes.settings.values))
    ask_open(window, "Open recording", folder, FILES, lambda path: try_to_open(window, path))


def try_to_open(
    window: SessionWindow, path: str, on_opened: Callable[[Recording], object] | None = None
) -> FileOpening | None:
    """Start to open the recording `path`. Returns None if the window cannot open recordings.

    `on_opened` is called with the recording; by default, a window is opened. The banner reports a failure.
    """
    open_recording = on_opened or window.openers.open_recording
    if open_recording is None:
        return None
    opening = FileOpening(path, window)
    opening.opened.connect(open_recording)
    opening.failed.connect(
        lambda reason: window.banner.show_message("The file cannot be opened", reason, is_temporary=True)
    )
    window.closing.connect(opening.cancel)
    _show_progress(opening, path, window)
    for end_signal in (opening.opened, opening.failed, opening.cancelled):
        end_signal.connect(opening.deleteLater)
    return opening


def _show_progress(opening: FileOpening, path: str, window: SessionWindow) -> None:
    dialog = QProgressDialog(f"Opening {Path(path).name}", "Cancel", 0, _STEPS, window)
    dialog.setWindowTitle("Open recording")
    dialog.setWindowModality(Qt.WindowModality.NonModal)
    dialog.setAutoClose(False)
    dialog.setAutoReset(False)
    dialog.setMinimumDuration(_DIALOG_DELAY_MS)
    dialog.canceled.connect(opening.cancel)
    opening.progressed.connect(lambda share: dialog.setValue(min(round(share * _STEPS), _STEPS - 1)))
    for end_signal in (opening.opened, opening.failed, opening.cancelled):
        end_signal.connect(dialog.deleteLater)
