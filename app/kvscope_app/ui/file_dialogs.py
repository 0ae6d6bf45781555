"""Qt's file dialogs without name completion, which interferes with typing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QFileDialog, QLineEdit, QWidget


class FileDialog(QFileDialog):
    """QFileDialog without name completion.

    Qt selects a completion by itself. If the user types faster than Qt reads the folder, it replaces typed characters.
    """

    def showEvent(self, event: QShowEvent) -> None:
        field = self.findChild(QLineEdit, "fileNameEdit")
        if field is not None:
            field.setCompleter(None)  # type: ignore[arg-type]  # None takes it away; PySide's stubs leave it out
        super().showEvent(event)


def ask_open(parent: QWidget, title: str, folder: str, filters: str, then: Callable[[str], object]) -> None:
    """Ask for an existing file, without blocking, and call `then` with its path."""
    dialog = FileDialog(parent, title, folder, filters)
    dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
    _open_dialog(dialog, then)


def ask_open_several(
    parent: QWidget, title: str, folder: str, filters: str, then: Callable[[list[str]], object]
) -> None:
    """Ask for existing files, without blocking, and call `then` with their paths."""
    dialog = FileDialog(parent, title, folder, filters)
    dialog.setFileMode(QFileDialog.FileMode.ExistingFiles)
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.filesSelected.connect(then)
    dialog.open()


def ask_folder(parent: QWidget, title: str, then: Callable[[str], object], folder: str = "") -> None:
    """Ask for an existing folder, starting at `folder`, without blocking, and call `then` with its path."""
    dialog = FileDialog(parent, title, folder)
    dialog.setFileMode(QFileDialog.FileMode.Directory)
    dialog.setOption(QFileDialog.Option.ShowDirsOnly)
    _open_dialog(dialog, then)


def ask_save(
    parent: QWidget,
    title: str,
    proposed: Path,
    filters: str,
    then: Callable[[str], object],
    *,
    confirms_overwrite: bool = True,
) -> None:
    """Ask for a path to save to, without blocking, and call `then` with it.

    A path without a suffix gets that of the selected filter, initially the first of `filters`.
    """
    folder = "" if proposed.parent == Path() else str(proposed.parent)
    dialog = FileDialog(parent, title, folder, filters)
    dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
    dialog.setOption(QFileDialog.Option.DontConfirmOverwrite, not confirms_overwrite)

    def update_suffix(chosen: str) -> None:
        if (match := re.search(r"\(\*\.(\w+)\)", chosen)) is not None:
            dialog.setDefaultSuffix(match[1])

    update_suffix(filters)
    dialog.filterSelected.connect(update_suffix)
    dialog.selectFile(proposed.name)
    _open_dialog(dialog, then)


def _open_dialog(dialog: FileDialog, then: Callable[[str], object]) -> None:
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.fileSelected.connect(then)
    dialog.open()
