"""Strips that float over the bottom of an area. Nothing below them moves when they appear."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QPoint, Qt, Signal
from PySide6.QtWidgets import QApplication, QSizePolicy, QVBoxLayout, QWidget


class PassingStrip(QWidget):
    """Strip that gives the focus to `focus_heir` when it is hidden while one of its buttons has the focus.

    Qt would focus the next button, which pressing Space again would trigger.
    """

    focus_heir: QWidget | None = None

    def setVisible(self, visible: bool) -> None:
        focus = QApplication.focusWidget()
        if not visible and self.focus_heir is not None and focus is not None and self.isAncestorOf(focus):
            self.focus_heir.setFocus(Qt.FocusReason.OtherFocusReason)
        super().setVisible(visible)


class FloatingStrips(QWidget):
    """Stack of strips over the bottom of the widget `over`, a descendant of `area`. The first strip is on top.

    While `over` is hidden, the strips float over the bottom of `area`.
    """

    covered = Signal(int)
    """Emitted after the strips were laid out, with the height in pixels that the visible strips cover (0 if all
    are hidden).
    """

    def __init__(self, area: QWidget, over: QWidget) -> None:
        super().__init__(area)
        self._area, self._over = area, over
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 6)
        self._column.setSpacing(0)
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Maximum)
        for watched in (area, over):
            watched.installEventFilter(self)

    def add(self, strip: PassingStrip) -> None:
        self._column.addWidget(strip)

    def event(self, event: QEvent) -> bool:
        is_handled = super().event(event)
        if event.type() in (QEvent.Type.LayoutRequest, QEvent.Type.Show):
            self._reposition()
        return is_handled

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.Resize, QEvent.Type.Move, QEvent.Type.Show, QEvent.Type.Hide):
            self._reposition()
        return False

    def _reposition(self) -> None:
        anchor = self._over
        bottom = anchor.mapTo(self._area, QPoint(0, anchor.height())).y() if anchor.isVisible() else self._area.height()
        width = self._area.width()
        self.resize(width, self.height())  # strips fold and wrap by their width
        self._column.activate()
        height = self._column.heightForWidth(width) if self._column.hasHeightForWidth() else self.sizeHint().height()
        self.setGeometry(0, max(bottom - height, 0), width, height)
        self.raise_()
        self.covered.emit(0 if self._column.isEmpty() else height)
