"""Non-modal dialog with margins, a size that fits the screen, and a Close button."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from kvscope_app.ui.zoom import scaled


class Sheet(QDialog):
    """Dialog whose contents go into `column`. It is deleted when it is closed."""

    def __init__(self, title: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(22, 20, 22, 18)
        self.column.setSpacing(12)

    def resize_comfortably(self, width: int, height: int = 0) -> None:
        """Resize to a size given at 100 % zoom; higher if the text needs it, but within the screen."""
        most = self.screen().availableGeometry().size() * 0.94
        wide = min(scaled(width), most.width())
        self.ensurePolished()
        needed = self.column.totalHeightForWidth(wide) if self.column.hasHeightForWidth() else 0
        self.resize(wide, min(max(scaled(height), needed), most.height()))

    def add_close(self, other: QWidget | None = None) -> None:
        """Add the Close button, with `other` at the opposite end of its row."""
        row = QHBoxLayout()
        if other is not None:
            row.addWidget(other)
        row.addStretch()
        close = QPushButton("Close")
        close.setDefault(True)
        close.clicked.connect(self.close)
        row.addWidget(close)
        self.column.addLayout(row)
