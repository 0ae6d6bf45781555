"""What an alarm says: its rule, and beside it since when; where there is no room for both, one below the other.

Owns how they stand. Knows no alarm.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QSizePolicy, QWidget

from kvscope_app.look.plain_text import PlainLabel
from kvscope_app.look.widgets import ElidedLabel

_SPACING: Final = 10


class AlarmLine(QWidget):
    """Never cuts the rule: below each other it goes on in the next line. Of the rest the tooltip has it all."""

    def __init__(self) -> None:
        super().__init__()
        self.rule, self.detail = PlainLabel(), ElidedLabel()
        self.rule.setProperty("look", "heading")
        self.detail.setProperty("look", "muted")
        self.rule.setMinimumWidth(24)
        self._row = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        self._row.setContentsMargins(0, 0, 0, 0)
        self._row.addWidget(self.rule)
        self._row.addWidget(self.detail, 1)
        self._stand(is_narrow=False)

    @property
    def is_narrow(self) -> bool:
        """Whether they stand below each other."""
        return self._row.direction() is QBoxLayout.Direction.TopToBottom

    def tell(self, rule: str, detail: str) -> None:
        """Say these from now on."""
        self.rule.setText(rule)
        self.detail.setText(detail)
        self._fold()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fold()

    def _fold(self) -> None:
        labels = (self.rule, self.detail)
        wanted = sum(label.fontMetrics().horizontalAdvance(label.text()) + _SPACING for label in labels)
        if self.is_narrow is not (self.width() < wanted):
            self._stand(is_narrow=not self.is_narrow)

    def _stand(self, *, is_narrow: bool) -> None:
        direction = QBoxLayout.Direction.TopToBottom if is_narrow else QBoxLayout.Direction.LeftToRight
        self._row.setDirection(direction)
        self._row.setSpacing(1 if is_narrow else _SPACING)
        self.rule.setWordWrap(is_narrow)
        across = QSizePolicy.Policy.Ignored if is_narrow else QSizePolicy.Policy.Maximum
        down = QSizePolicy(across, QSizePolicy.Policy.Minimum)
        down.setHeightForWidth(is_narrow)
        self.rule.setSizePolicy(down)
