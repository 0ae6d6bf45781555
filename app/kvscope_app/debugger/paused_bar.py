"""Bar over the page map while the engine is paused: who paused it, the last answer, and buttons to continue."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from kvscope_app.debugger.debugger import Debugger
from kvscope_app.ui.icons import pixmap
from kvscope_app.ui.passing_strip import PassingStrip
from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.ui.zoom import scaled


class PausedBar(PassingStrip):
    """Bar that is visible only while the engine is paused. `actions` has the label and action of each button."""

    def __init__(
        self, debugger: Debugger, actions: tuple[tuple[str, QAction], ...], parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._debugger = debugger
        self._icon, self.paused_by, self.answer = PlainLabel(), PlainLabel(), ElidedLabel()
        self.paused_by.setProperty("look", "heading")
        self.answer.setProperty("look", "muted")
        self.buttons = [QPushButton(label) for label, _ in actions]
        self._actions = [action for _, action in actions]
        self._build()
        self.hide()
        for button, action in zip(self.buttons, self._actions, strict=True):
            button.setFocusPolicy(Qt.FocusPolicy.TabFocus)  # a click does not move the keyboard focus
            button.clicked.connect(action.trigger)
            action.changed.connect(self._update_buttons)
        self._update_buttons()
        debugger.answered.connect(self._show_answer)
        debugger.session.status_changed.connect(self._on_status)
        self._on_status()

    def apply_theme(self, theme: Theme) -> None:
        self._icon.setPixmap(pixmap("pause", theme.warn, scaled(20)))

    def _on_status(self) -> None:
        paused_by = self._debugger.paused_by
        if paused_by:
            self.paused_by.setText(f"Paused by {paused_by}")
            self.setAccessibleName(f"The engine is paused by {paused_by}")
        if bool(paused_by) != (not self.isHidden()):
            self.answer.setText("")
            self.setVisible(bool(paused_by))

    def _show_answer(self, text: str, _was_done: bool) -> None:
        self.answer.setText(text)

    def _update_buttons(self) -> None:
        for button, action in zip(self.buttons, self._actions, strict=True):
            button.setEnabled(action.isEnabled())
            button.setToolTip(action.toolTip())

    def _build(self) -> None:
        frame = QFrame()
        frame.setProperty("look", "paused")
        row = QHBoxLayout(frame)
        row.setContentsMargins(14, 6, 8, 6)
        row.setSpacing(8)
        row.addWidget(self._icon)
        row.addWidget(self.paused_by)
        row.addWidget(self.answer, 1)
        for button in self.buttons:
            row.addWidget(button)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(8, 8, 8, 2)
        outer.addWidget(frame)
