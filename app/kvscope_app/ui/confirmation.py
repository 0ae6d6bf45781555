"""Non-modal confirmation before an action that cannot be undone."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMessageBox, QWidget


def confirm(parent: QWidget, question: str, yes: str, action: Callable[[], object]) -> QMessageBox:
    """Call `action` if the button `yes` is pressed. Enter and Escape cancel."""
    box = QMessageBox(parent)
    box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    box.setIcon(QMessageBox.Icon.NoIcon)
    box.setWindowTitle("kvscope")
    box.setTextFormat(Qt.TextFormat.PlainText)
    box.setText(question)
    sure = box.addButton(yes.replace("&", ""), QMessageBox.ButtonRole.DestructiveRole)
    sure.setProperty("look", "danger")
    box.setDefaultButton(box.addButton(QMessageBox.StandardButton.Cancel))
    sure.clicked.connect(lambda: action())
    box.open()
    return box
