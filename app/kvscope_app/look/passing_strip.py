"""A strip above the map that comes and goes, and takes the keyboard with it nowhere else than to the map."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QWidget


class PassingStrip(QWidget):
    """Where it goes while one of its buttons has the focus, `heir` gets it: Qt would give it to the button that comes
    next, and the next Space would press that."""

    heir: QWidget | None = None

    def setVisible(self, visible: bool) -> None:
        focus = QApplication.focusWidget()
        if not visible and self.heir is not None and focus is not None and self.isAncestorOf(focus):
            self.heir.setFocus(Qt.FocusReason.OtherFocusReason)
        super().setVisible(visible)
