"""Card that floats next to a hovered block, with the block's facts and text."""

from __future__ import annotations

from html import escape
from typing import Final

from PySide6.QtCore import QPoint, QRect, Qt
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QVBoxLayout, QWidget

from kvscope_app.ui.fonts import mono
from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.page_map.block_facts import BlockFacts
from kvscope_app.views.page_map.color_modes import lower_cached
from kvscope_telemetry.messages.commands import BlockContent

_GAP: Final = 14
_WIDTH: Final = 284
_MAX_TEXT_CHARS: Final = 240
_MAX_NOTES: Final = 3


class BlockCard(QFrame):
    """Card that shows one block. Mouse input passes through to the page map below it."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("look", "tip")
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.setFixedWidth(scaled(_WIDTH))
        self._title, self._state, self._text = PlainLabel(), PlainLabel(), PlainLabel()
        self._title.setProperty("look", "heading")
        self._text.setWordWrap(True)
        self._rows = QLabel()
        self._rows.setWordWrap(True)
        self._theme = DARK
        self._build()
        self.hide()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._text.setFont(mono(0.92))
        self._text.setStyleSheet(
            f"background: {theme.base}; border: 1px solid {theme.border}; border-radius: 5px; padding: 5px 7px;"
        )

    def show_block(self, facts: BlockFacts, content: BlockContent | None, placeholder: str = "") -> None:
        """Show a block's facts and text.

        Args:
            facts: Facts about the block.
            content: Tokens and text of the block; None while they are unknown.
            placeholder: Text shown in place of unknown content.
        """
        self._title.setText(facts.title)
        self._state.setText(facts.state)
        color = str(getattr(self._theme, facts.color))
        if facts.is_cached_in_lower_tier:  # as its cell is drawn
            color = lower_cached(color, self._theme)
        self._state.setStyleSheet(
            f"background: {color}; color: {_text_color_on(color)}; border-radius: 7px; padding: 1px 8px;"
            f" font-weight: 600; border: 1px solid {self._theme.border};"
        )
        self._fill_rows(facts, content.notes[:_MAX_NOTES] if content is not None else ())
        self._fill_text(content, placeholder)
        self._adjust_height()

    def move_next_to(self, cell: QRect, bounds: QRect) -> None:
        """Show the card next to the hovered cell, inside `bounds`. Both rectangles are in the parent's coordinates."""
        right, left = cell.right() + _GAP, cell.left() - _GAP - self.width()
        if right + self.width() <= bounds.right() or left >= bounds.left():
            x = right if right + self.width() <= bounds.right() else left
            y = cell.top() - 8
        else:  # no space at either side: below, or above
            below, x = cell.bottom() + _GAP, cell.center().x() - self.width() // 2
            y = below if below + self.height() <= bounds.bottom() else cell.top() - _GAP - self.height()
        x = min(x, bounds.right() - self.width())
        y = min(y, bounds.bottom() - self.height())
        self.move(QPoint(max(bounds.left(), x), max(bounds.top(), y)))
        self.show()
        self.raise_()

    def _build(self) -> None:
        head = QHBoxLayout()
        head.addWidget(self._title)
        head.addStretch()
        head.addWidget(self._state)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 10, 12, 11)
        column.setSpacing(7)
        column.addLayout(head)
        column.addWidget(self._rows)
        column.addWidget(self._text)

    def _adjust_height(self) -> None:
        layout = self.layout()
        assert layout is not None, "made in _build"
        layout.activate()
        self.resize(self.width(), layout.totalHeightForWidth(self.width()))

    def _fill_rows(self, facts: BlockFacts, notes: tuple[tuple[str, str], ...]) -> None:
        if not facts.rows:
            self._rows.setText(facts.empty_text)
            return
        muted = self._theme.muted
        lines = (
            f"<tr><td style='color:{muted}; padding-right:12px'>{escape(label)}</td><td>{escape(value)}</td></tr>"
            for label, value in (*facts.rows, *notes)
        )
        self._rows.setText(f"<table cellspacing='0' cellpadding='1'>{''.join(lines)}</table>")

    def _fill_text(self, content: BlockContent | None, placeholder: str) -> None:
        if content is not None and content.token_ids:
            text = content.text if len(content.text) <= _MAX_TEXT_CHARS else content.text[:_MAX_TEXT_CHARS] + "…"
            self._text.setText(text.replace("\n", "⏎\n") or "(no printable text)")
        else:
            self._text.setText(placeholder)
        self._text.setVisible(bool(self._text.text()))


def _text_color_on(color: str) -> str:
    return "#0d0f13" if QColor(color).lightnessF() > 0.45 else "#f4f6fa"
