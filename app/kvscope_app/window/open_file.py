"""Asks for a recording and opens it in a window of its own; what cannot be opened is told in the banner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFileDialog

from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_app.window.main_window import MainWindow

_FILES: Final = "Recordings (*.mcap *.mcap.part);;All files (*)"


def ask_file(window: MainWindow) -> None:
    """Show the dialog; it leaves the window alive."""
    dialog = QFileDialog(window, "Open recording", filter=_FILES)
    dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.fileSelected.connect(lambda path: try_to_open(window, path))
    dialog.open()


def try_to_open(window: MainWindow, path: str) -> None:
    """Open `path`, or say why not."""
    if window.open_file is None:
        return
    try:
        window.open_file(path)
    except BadInput as error:
        window.banner.tell("That file cannot be opened", str(error))
