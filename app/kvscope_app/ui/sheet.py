"""Non-modal dialog with margins, a size that fits the screen, and a Close button."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from kvscope_app.ui.zoom import scaled


class Sheet(QDialog):
    def __init__(self, title: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(22, 20, 22, 18)
        self.column.setSpacing(12)

    def resize_comfortably(self, width: int, height: int = 0) -> None:
        """Resize to `width` and at least `height`, in pixels at 100 % zoom.

        The dialog becomes higher if its text needs that, but not larger than 94 % of the screen.
        """
        available = self.screen().availableGeometry().size() * 0.94
        dialog_width = min(scaled(width), available.width())
        self.ensurePolished()
        needed = self.column.totalHeightForWidth(dialog_width) if self.column.hasHeightForWidth() else 0
        self.resize(dialog_width, min(max(scaled(height), needed), available.height()))

    def add_close(self, other: QWidget | None = None) -> None:
        """Add a row with the Close button at the right and `other` at the left."""
        row = QHBoxLayout()
        if other is not None:
            row.addWidget(other)
        row.addStretch()
        close = QPushButton("Close")
        close.setDefault(True)
        close.clicked.connect(self.close)
        row.addWidget(close)
        self.column.addLayout(row)
