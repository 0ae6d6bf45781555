"""Non-modal confirmation before an action that cannot be undone."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMessageBox, QWidget


def confirm(parent: QWidget, question: str, yes: str, action: Callable[[], object]) -> QMessageBox:
    """Ask `question`, and call `action` if the button labelled `yes` is pressed. Enter and Escape cancel."""
    box = QMessageBox(parent)
    box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    box.setIcon(QMessageBox.Icon.NoIcon)
    box.setWindowTitle("kvscope")
    box.setTextFormat(Qt.TextFormat.PlainText)
    box.setText(question)
    yes_button = box.addButton(yes.replace("&", ""), QMessageBox.ButtonRole.DestructiveRole)
    yes_button.setProperty("look", "danger")
    box.setDefaultButton(box.addButton(QMessageBox.StandardButton.Cancel))
    yes_button.clicked.connect(lambda: action())
    box.open()
    return box
