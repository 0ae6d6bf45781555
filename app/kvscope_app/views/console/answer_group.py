"""Answers to one prompt that were requested together: side by side, or below each other if there is little space."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from PySide6.QtCore import QSize, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QFrame, QHBoxLayout, QToolButton, QVBoxLayout

from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import tool_button
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.console.message_card import MessageCard

MIN_COLUMN_WIDTH: Final = 240
"""Width of an answer, in pixels at a zoom of 100 %, below which the answers are below each other."""
_CHOOSE_TIP: Final = "Later prompts continue this answer; the others are kept as its versions"


class AnswerColumn(QFrame):
    """One answer of a group: a button that chooses it, one that stops it, and its card."""

    def __init__(self, card: MessageCard, number: int) -> None:
        super().__init__()
        self.setObjectName("column")
        self.card = card
        self.choose: QToolButton = tool_button("Continue with this", _CHOOSE_TIP, checkable=True)
        self.choose.setAccessibleName(f"Continue with answer {number}")
        self.stop: QToolButton = tool_button("Stop", "Stop this answer; the others go on")
        self.stop.setAccessibleName(f"Stop answer {number}")
        self.stop.hide()
        head = QHBoxLayout()
        head.setContentsMargins(8, 4, 8, 0)
        head.addWidget(self.choose)
        head.addStretch(1)
        head.addWidget(self.stop)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addLayout(head)
        column.addWidget(card)
        column.addStretch(1)

    def show_chosen(self, is_chosen: bool, theme: Theme) -> None:
        self.choose.setChecked(is_chosen)
        self.choose.setText("Continues here" if is_chosen else "Continue with this")
        border = theme.accent if is_chosen else theme.border
        self.setStyleSheet(f"QFrame#column {{ border: 1px solid {border}; border-radius: 8px; }}")


class AnswerGroup(QFrame):
    chosen = Signal(object)
    """Emitted with the message with which the chat shall continue."""
    stop_requested = Signal(object)
    """Emitted with the message that shall not be continued by the engine."""

    def __init__(self, cards: Sequence[MessageCard], theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._chosen_key = ""
        self.columns = [AnswerColumn(card, number) for number, card in enumerate(cards, 1)]
        self._row = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        self._row.setContentsMargins(0, 0, 0, 0)
        self._row.setSpacing(8)
        for column in self.columns:
            self._row.addWidget(column, 1)
            column.choose.clicked.connect(partial(self._on_chosen, column))
            column.stop.clicked.connect(partial(self._on_stop, column))

    @property
    def is_side_by_side(self) -> bool:
        return self._row.direction() == QBoxLayout.Direction.LeftToRight

    def show_chosen(self, key: str) -> None:
        """Mark the answer with this key as the one with which the chat continues."""
        self._chosen_key = key
        for column in self.columns:
            column.show_chosen(column.card.message.key == key, self._theme)

    def show_unfinished(self, keys: Collection[str]) -> None:
        """Show a Stop button for the answers with these keys, which are being written."""
        for column in self.columns:
            column.stop.setVisible(column.card.message.key in keys)

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.show_chosen(self._chosen_key)

    def minimumSizeHint(self) -> QSize:
        """Return the size of the widest answer: the others then move below it."""
        width = max((column.minimumSizeHint().width() for column in self.columns), default=0)
        return QSize(width, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        needed = scaled(MIN_COLUMN_WIDTH)
        needed = max([needed, *(column.minimumSizeHint().width() for column in self.columns)])
        is_wide = self.width() >= len(self.columns) * (needed + self._row.spacing())
        self._row.setDirection(QBoxLayout.Direction.LeftToRight if is_wide else QBoxLayout.Direction.TopToBottom)

    def _on_chosen(self, column: AnswerColumn, *_: object) -> None:
        column.choose.setChecked(column.card.message.key == self._chosen_key)  # checked by `show_chosen`
        self.chosen.emit(column.card.message)

    def _on_stop(self, column: AnswerColumn, *_: object) -> None:
        column.stop.setEnabled(False)
        self.stop_requested.emit(column.card.message)
