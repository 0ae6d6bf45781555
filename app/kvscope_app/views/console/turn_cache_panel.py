"""Panel of an answer's card about the KV cache: the strip of its blocks, its summary, and where the prefix ended."""

from __future__ import annotations

from PySide6.QtWidgets import QVBoxLayout, QWidget

from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import label
from kvscope_app.views.console.cache_strip import CacheStrip
from kvscope_app.views.console.turn_blocks import TurnBlocks


class TurnCachePanel(QWidget):
    """Hidden until there is something to show."""

    def __init__(self) -> None:
        super().__init__()
        self.strip = CacheStrip()
        self.summary = label(look="muted", wraps=True)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 2, 0, 0)
        column.setSpacing(2)
        for widget in (self.strip, self.summary):
            column.addWidget(widget)
        self.hide()

    def show_blocks(self, blocks: TurnBlocks) -> None:
        self.strip.show_blocks(blocks)
        self.strip.setVisible(bool(blocks.states.size))
        self.summary.setText(blocks.summary)
        self.setVisible(bool(blocks.summary))

    def apply_theme(self, theme: Theme) -> None:
        self.strip.apply_theme(theme)
