"""Asking for a file, as Qt asks, without what stands in a person's way."""

from __future__ import annotations

from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QFileDialog, QLineEdit


class FileDialog(QFileDialog):
    """Qt's own, but names are not completed while they are typed: what Qt proposes is selected and, where letters come
    faster than the folder is read, takes the place of some of them.
    """

    def showEvent(self, event: QShowEvent) -> None:
        field = self.findChild(QLineEdit, "fileNameEdit")
        if field is not None:
            field.setCompleter(None)  # type: ignore[arg-type]  # None takes it away; PySide's stubs leave it out
        super().showEvent(event)
