"""Non-modal confirmation before an action that cannot be undone."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMessageBox, QWidget


def ask(parent: QWidget, question: str, yes: str, do: Callable[[], object]) -> QMessageBox:
    """Call `do` if the button `yes` is pressed. Enter and Escape cancel."""
    box = QMessageBox(parent)
    box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    box.setIcon(QMessageBox.Icon.NoIcon)
    box.setWindowTitle("kvscope")
    box.setTextFormat(Qt.TextFormat.PlainText)
    box.setText(question)
    sure = box.addButton(yes.replace("&", ""), QMessageBox.ButtonRole.DestructiveRole)
    sure.setProperty("look", "danger")
    box.setDefaultButton(box.addButton(QMessageBox.StandardButton.Cancel))
    sure.clicked.connect(lambda: do())
    box.open()
    return box
