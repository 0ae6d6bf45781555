"""Button beside Send: how many answers to the next prompt are generated, side by side."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import Signal
from PySide6.QtGui import QActionGroup
from PySide6.QtWidgets import QMenu, QToolButton

from kvscope_app.ui.number_text import plural
from kvscope_app.views.console.conversation import MAX_ANSWERS


class AnswerCountButton(QToolButton):
    chosen = Signal(int)
    """Emitted when the user chooses a number of answers."""

    def __init__(self) -> None:
        super().__init__()
        self.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        menu = QMenu(self)
        group = QActionGroup(menu)
        self._actions = []
        for number in range(1, MAX_ANSWERS + 1):
            action = menu.addAction(f"{plural(number, 'answer')} per prompt")
            action.setCheckable(True)
            action.triggered.connect(partial(self._on_chosen, number))
            group.addAction(action)
            self._actions.append(action)
        self.setMenu(menu)
        self.show_number(1)

    def show_number(self, number: int) -> None:
        self.setText(f"×{number}")
        self._actions[number - 1].setChecked(True)
        self.setAccessibleName(f"{plural(number, 'answer')} per prompt")
        self.setToolTip(f"{plural(number, 'answer')} per prompt: click to get several, side by side")

    def _on_chosen(self, number: int, *_: object) -> None:
        self.show_number(number)
        self.chosen.emit(number)
