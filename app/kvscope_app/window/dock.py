"""Dock widget with a custom title bar."""

from __future__ import annotations

from itertools import takewhile

from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import QDockWidget, QHBoxLayout, QToolButton, QWidget

from kvscope_app.ui.focus import tab_order
from kvscope_app.ui.icons import icon
from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.zoom import scaled


class DockTitle(QWidget):
    """Title bar with the name of the dock and buttons to float and close it.

    Qt handles double click (float) and dragging (move).
    """

    def __init__(self, dock: QDockWidget) -> None:
        super().__init__(dock)
        self.setObjectName("dock_title")
        self.setAutoFillBackground(True)
        self._float, self._close = QToolButton(), QToolButton()
        self._float.setAccessibleName(f"Float {dock.windowTitle()}")
        self._float.setToolTip("Float or dock")
        self._close.setAccessibleName(f"Close {dock.windowTitle()}")
        self._close.setToolTip("Close (reopen from the View menu)")
        self._float.clicked.connect(lambda: dock.setFloating(not dock.isFloating()))
        self._close.clicked.connect(dock.close)
        row = QHBoxLayout(self)
        row.setContentsMargins(14, 3, 6, 3)
        row.setSpacing(0)
        row.addWidget(PlainLabel(dock.windowTitle()))
        row.addStretch()
        for button in (self._float, self._close):
            button.setIconSize(QSize(scaled(13), scaled(13)))
            button.setAutoRaise(True)
            button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
            row.addWidget(button)

    def follow_in_tab_order(self, widget: QWidget) -> None:
        self.setTabOrder(widget, self._float)
        self.setTabOrder(self._float, self._close)

    def apply_theme(self, theme: Theme) -> None:
        self._float.setIcon(icon("float", theme.muted, size=13))
        self._close.setIcon(icon("close", theme.muted, size=13))


class Dock(QDockWidget):
    """Dock for one view. Saved layouts identify it by its object name, which contains the view's name."""

    def __init__(self, title: str, object_name: str, parent: QWidget) -> None:
        super().__init__(title, parent)
        self.setObjectName(f"dock_{object_name}")
        self._title = DockTitle(self)
        self.setTitleBarWidget(self._title)
        self.setWidget(QWidget())

    def apply_theme(self, theme: Theme) -> None:
        self._title.apply_theme(theme)

    def setWidget(self, view: QWidget) -> None:
        """Put `view` into the dock, and the title's buttons after it in the Tab order."""
        super().setWidget(view)
        last_stop = view
        for descendant in takewhile(view.isAncestorOf, tab_order(view)):
            last_stop = descendant
        self._title.follow_in_tab_order(last_stop)
