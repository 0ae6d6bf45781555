"""How full the model's context is: a thin bar and the two numbers."""

from __future__ import annotations

from typing import Final

from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QWidget

from kvscope_app.look.makers import label
from kvscope_app.look.number_text import count
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.look.zoom import scaled

NEARLY_FULL: Final = 0.8
FULL: Final = 0.95


class ContextBar(QWidget):
    """Tokens of the conversation, and how many one request may have, 0 when that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setRange(0, 1000)
        self.bar.setFixedWidth(scaled(72))
        self.bar.setAccessibleName("Context fill")
        self.text = label(look="muted", elastic=True)
        self._theme: Theme = DARK
        self._share = 0.0
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 0, 12, 0)
        row.setSpacing(8)
        row.addWidget(self.bar)
        row.addWidget(self.text, 1)

    def show_fill(self, used: int, limit: int) -> None:
        """`used` of `limit` tokens."""
        self._share = min(used / limit, 1.0) if limit else 0.0
        self.bar.setVisible(limit > 0)
        self.bar.setValue(round(self._share * 1000))
        whole = f"{count(used)} of {count(limit)} tokens of context" if limit else f"{count(used)} tokens of context"
        self.text.setText(whole if used or limit else "")
        self.text.setToolTip(
            f"{self._share:.0%} of what one request may hold, by the model and by the KV cache" if limit else ""
        )
        self._color()

    def apply_theme(self, theme: Theme) -> None:
        """Recolour."""
        self._theme = theme
        self._color()

    def _color(self) -> None:
        name = "bad" if self._share >= FULL else "warn" if self._share >= NEARLY_FULL else "accent"
        sheet = f"QProgressBar::chunk {{ background: {getattr(self._theme, name)}; }}"
        if self.bar.styleSheet() != sheet:
            self.bar.setStyleSheet(sheet)
