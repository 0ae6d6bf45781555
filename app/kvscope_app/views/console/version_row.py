"""Row below a message that has several versions: buttons that switch versions, and one that compares their blocks."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import QPoint, Signal
from PySide6.QtWidgets import QHBoxLayout, QMenu, QWidget

from kvscope_app.ui.widget_factories import label, tool_button


class VersionRow(QWidget):
    """Hidden while there is only one version."""

    version_requested = Signal(int)
    """Emitted with the offset to the version to show: -1 or 1."""
    comparison_requested = Signal(int)
    """Emitted with the index of the version to compare the shown one with, or -1 to end the comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.previous, self.next = tool_button("‹", "Previous version"), tool_button("›", "Next version")
        self.previous.setAccessibleName("Previous version")
        self.next.setAccessibleName("Next version")
        self.version = label(look="muted")
        self.compare = tool_button(
            "Compare blocks", "Show on the page map which blocks two versions share (Esc ends it)", checkable=True
        )
        self.menu = QMenu(self)
        self._index, self._num_versions = 0, 1
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2)
        for widget in (self.previous, self.version, self.next, self.compare):
            row.addWidget(widget)
        row.addStretch(1)
        self.previous.clicked.connect(lambda: self.version_requested.emit(-1))
        self.next.clicked.connect(lambda: self.version_requested.emit(1))
        self.compare.clicked.connect(self._on_compare)
        self.show_versions(0, 1)

    def show_versions(self, index: int, num_versions: int, *, can_switch: bool = True) -> None:
        """Show the number of this version, `index` (from 0) of `num_versions`. `can_switch` is False if all are
        visible.
        """
        for widget in (self.previous, self.version, self.next):
            widget.setVisible(can_switch)
        self._index, self._num_versions = index, num_versions
        self.version.setText(f"{index + 1}/{num_versions}")
        self.previous.setEnabled(index > 0)
        self.next.setEnabled(index < num_versions - 1)
        self.setVisible(num_versions > 1)

    def show_comparison(self, *, is_active: bool) -> None:
        self.compare.setChecked(is_active)

    def _on_compare(self, is_checked: bool) -> None:
        if not is_checked:
            self.comparison_requested.emit(-1)
            return
        self.compare.setChecked(False)  # checked by `show_comparison`, once the page map shows the comparison
        others = [index for index in range(self._num_versions) if index != self._index]
        if len(others) == 1:
            self.comparison_requested.emit(others[0])
            return
        self.menu.clear()
        for index in others:
            action = self.menu.addAction(f"With version {index + 1}")
            action.triggered.connect(partial(self._request_comparison, index))
        self.menu.popup(self.compare.mapToGlobal(QPoint(0, self.compare.height())))

    def _request_comparison(self, index: int, *_: object) -> None:
        self.comparison_requested.emit(index)
