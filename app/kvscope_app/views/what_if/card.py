"""One policy: its name, its map, what it wastes, who could run. Knows one answer's words and cells only."""

from __future__ import annotations

from PySide6.QtWidgets import QBoxLayout, QFrame, QLabel, QSizePolicy, QVBoxLayout

from kvscope_app.look.makers import set_look
from kvscope_app.look.plain_text import plain_tip
from kvscope_app.look.theme import Theme
from kvscope_app.look.widgets import ElidedLabel
from kvscope_app.views.what_if import words
from kvscope_app.views.what_if.small_map import BESIDE_HEIGHT, HEIGHT, SmallMap
from kvscope_telemetry.messages.what_if import Answer, PolicyUse


class Card(QFrame):
    """As narrow as it must be: its words are elided, and the tooltip has them all."""

    def __init__(self) -> None:
        super().__init__()
        self.setProperty("look", "card")
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.name = ElidedLabel()
        self.name.setProperty("look", "heading")
        self.map = SmallMap()
        self.waste = _large()
        self.share, self.placed, self.difference = ElidedLabel(), ElidedLabel(), ElidedLabel()
        for muted in (self.share, self.difference):
            muted.setProperty("look", "muted")
        self._lay_out()

    def show_use(self, use: PolicyUse, answer: Answer) -> None:
        """Fill in what the policy makes of the requests."""
        set_look(self, "current" if use.is_current else "card")
        self.name.setText(words.name(use))
        self.map.show_cells(use.cells)
        self.waste.setText(words.waste(use, answer))
        self.share.setText(words.waste_share(use))
        self.placed.setText(words.placed(use))
        set_look(self.difference, "accent" if use.is_current else "muted")
        set_look(self.placed, "warning" if use.num_waiting or use.refused else "")
        self.difference.setText(words.difference(use, answer))
        self.setToolTip(plain_tip(words.tip(use, answer)))
        self.setAccessibleName(self.name.text())
        self.setAccessibleDescription(self.summary)

    @property
    def summary(self) -> str:
        """What it says, in one line."""
        parts = (self.waste.text(), self.share.text(), self.placed.text(), self.difference.text())
        return ", ".join(part for part in parts if part)

    def apply_theme(self, theme: Theme) -> None:
        """Recolour the map."""
        self.map.apply_theme(theme)

    def set_beside(self, beside: bool) -> None:
        """Whether the words are beside the map, as in a narrow panel, or below it."""
        direction = QBoxLayout.Direction.LeftToRight if beside else QBoxLayout.Direction.TopToBottom
        self._body.setDirection(direction)
        self._body.setSpacing(12 if beside else 5)
        self.map.setFixedHeight(BESIDE_HEIGHT if beside else HEIGHT)

    def _lay_out(self) -> None:
        texts = QVBoxLayout()
        texts.setSpacing(3)
        for line in (self.waste, self.share, self.placed, self.difference):
            texts.addWidget(line)
        self._body = QBoxLayout(QBoxLayout.Direction.TopToBottom)
        self._body.addWidget(self.map, 2)
        self._body.addLayout(texts, 3)
        column = QVBoxLayout(self)
        column.setContentsMargins(11, 8, 11, 9)
        column.setSpacing(5)
        column.addWidget(self.name)
        column.addLayout(self._body)
        self.set_beside(False)


def _large() -> QLabel:
    made = ElidedLabel()
    font = made.font()
    font.setPointSizeF(font.pointSizeF() * 1.4)
    font.setBold(True)
    made.setFont(font)
    return made
