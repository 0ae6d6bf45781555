"""What there is to read of the chosen prefix: a line of facts and its text, as far as it is known."""

from __future__ import annotations

from typing import Final

from PySide6.QtGui import QTextOption
from PySide6.QtWidgets import QPlainTextEdit, QVBoxLayout, QWidget

from kvscope_app.look.fonts import mono
from kvscope_app.look.number_text import count, num_bytes, plural
from kvscope_app.look.theme import Theme
from kvscope_app.look.widgets import ElidedLabel
from kvscope_app.views.prefixes.columns import Moment, holder_words, idle_words, where_words
from kvscope_telemetry.ledger import NO_OWNER

MAX_BLOCKS: Final = 64
"""Whose text is read."""
_LINES: Final = 4


class PrefixDetail(QWidget):
    """Hidden until something is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.facts = ElidedLabel()
        self.text = QPlainTextEdit()
        self.text.setReadOnly(True)
        self.text.setWordWrapMode(QTextOption.WrapMode.WrapAnywhere)
        self.text.setAccessibleName("Text of the chosen prefix")
        self.text.setTabChangesFocus(True)
        column = QVBoxLayout(self)
        column.setContentsMargins(8, 4, 8, 6)
        column.setSpacing(4)
        column.addWidget(self.facts)
        column.addWidget(self.text)
        self.hide()

    def apply_theme(self, theme: Theme) -> None:
        """Take the size of letters."""
        self.text.setFont(mono(0.92))
        self.text.setFixedHeight(_LINES * self.text.fontMetrics().lineSpacing() + 12)

    def show_node(self, moment: Moment, node: int, text: str | None) -> None:
        """`text`: as far as it is known; None where it cannot be had."""
        words = facts_line(moment, node)
        if words != self.facts.text():
            self.facts.setText(words)
        self.text.setVisible(bool(text))
        if text and text != self.text.toPlainText():
            self.text.setPlainText(text)
        self.show()


def facts_line(moment: Moment, node: int) -> str:
    """The node in one line."""
    tree, told = moment.tree, moment.told
    blocks, owner, before = int(tree.num_blocks[node]), int(tree.owner[node]), int(tree.num_before[node])
    if not blocks:
        return f"What {plural(int(tree.num_with_all[node]), 'block')} below begin with was evicted"
    place = "after what was evicted" if before < 0 else f"from token {count(before * moment.cache.block_size)}"
    parts = [
        f"{plural(blocks, 'block')}, {plural(int(moment.num_tokens[node]), 'token')} {place}",
        f"in {where_words(tree, node)}",
        *([num_bytes(int(moment.num_bytes[node]))] if moment.cache.block_bytes else []),
        *([holder_words(int(tree.holders[node]))] if told.ref_counts else []),
        *([f"used {idle_words(moment, node)}{' ago' if moment.idle_s(node) else ''}"] if told.last_used else []),
        *([plural(int(tree.hits[node]), "hit")] if told.prefix_hits and tree.hits[node] else []),
        *([f"written by request #{owner}"] if told.owners and owner != NO_OWNER and owner else []),
    ]
    return "  ·  ".join(parts)
