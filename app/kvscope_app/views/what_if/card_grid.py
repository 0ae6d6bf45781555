"""Cards side by side, as many in a row as have room."""

from __future__ import annotations

from typing import Final

from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QGridLayout, QWidget

from kvscope_app.look.theme import DARK, Theme
from kvscope_app.views.what_if.card import Card
from kvscope_telemetry.messages.what_if import Answer

MIN_CARD_WIDTH: Final = 152
_GAP: Final = 8


class CardGrid(QWidget):
    """Owns the cards."""

    def __init__(self) -> None:
        super().__init__()
        self.cards: list[Card] = []
        self._theme = DARK
        self._num_columns = 1
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setSpacing(_GAP)

    def show_answer(self, answer: Answer) -> None:
        """A card a policy: the one in use first, then in the answer's order."""
        if len(answer.policies) != len(self.cards):
            self._make(len(answer.policies))
        for card, use in zip(self.cards, sorted(answer.policies, key=lambda use: not use.is_current), strict=True):
            card.show_use(use, answer)

    def apply_theme(self, theme: Theme) -> None:
        """Recolour the maps."""
        self._theme = theme
        for card in self.cards:
            card.apply_theme(theme)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._arrange()

    def _make(self, number: int) -> None:
        for card in self.cards[number:]:
            self._grid.removeWidget(card)
            card.deleteLater()
        del self.cards[number:]
        while len(self.cards) < number:
            self.cards.append(Card())
            self.cards[-1].apply_theme(self._theme)
        self._num_columns = 0
        self._arrange()

    def _arrange(self) -> None:
        fitting = max(1, (self.width() + _GAP) // (MIN_CARD_WIDTH + _GAP))
        num_columns = num_columns_of(len(self.cards), fitting)
        if num_columns == self._num_columns:
            return
        for column in range(max(self._num_columns, num_columns)):
            self._grid.setColumnStretch(column, 1 if column < num_columns else 0)
        self._num_columns = num_columns
        for index, card in enumerate(self.cards):
            card.set_beside(num_columns == 1)
            self._grid.addWidget(card, index // num_columns, index % num_columns)


def num_columns_of(num_cards: int, fitting: int) -> int:
    """As few as need no more rows than `fitting` columns would, so that rows are as full as they can be."""
    num_rows = -(-max(1, num_cards) // fitting)
    return -(-max(1, num_cards) // num_rows)
