"""Non-modal dialogs: information about the program, and the engine's log."""

from __future__ import annotations

import platform
from importlib.metadata import version

from PySide6.QtCore import Qt, qVersion
from PySide6.QtWidgets import (
    QHBoxLayout,
    QPlainTextEdit,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.ui.fonts import mono, sans
from kvscope_app.ui.icons import pixmap
from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.sheet import Sheet
from kvscope_app.ui.zoom import scaled


def versions_text() -> str:
    return (
        f"Python {platform.python_version()}, Qt {qVersion()}, PySide6 {version('PySide6-Essentials')},"
        f" {platform.system()} {platform.release()}"
    )


def about_dialog(parent: QWidget) -> Sheet:
    dialog = Sheet("About kvscope", parent)
    logo, name = PlainLabel(), PlainLabel("kvscope")
    logo.setPixmap(pixmap("kvscope", "#000001", scaled(64)))
    name.setFont(sans(1.6))
    description = PlainLabel(
        f"Version {version('kvscope')}\n\nSee inside the KV cache of language-model inference.\n"
        f"Apache License 2.0\n\n{versions_text()}"
    )
    description.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    description.setWordWrap(True)
    row, text = QHBoxLayout(), QVBoxLayout()
    row.setSpacing(18)
    row.addWidget(logo, 0, Qt.AlignmentFlag.AlignTop)
    text.addWidget(name)
    text.addWidget(description)
    text.addStretch()
    row.addLayout(text, 1)
    dialog.column.addLayout(row)
    dialog.add_close()
    dialog.resize_comfortably(440)
    return dialog


def log_dialog(parent: QWidget, log: str) -> Sheet:
    dialog = Sheet("Engine log", parent)
    text = QPlainTextEdit(log or "The engine printed nothing.")
    text.setReadOnly(True)
    text.setFont(mono())
    text.setAccessibleName("Engine log")
    dialog.column.addWidget(text)
    dialog.add_close()
    dialog.resize_comfortably(820, 520)
    text.verticalScrollBar().setValue(text.verticalScrollBar().maximum())
    return dialog
