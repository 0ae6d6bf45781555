"""What a window shows while files are dragged over it: that they can be dropped, and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from PySide6.QtCore import QMimeData, Qt
from PySide6.QtWidgets import QFrame, QVBoxLayout, QWidget

from kvscope_app.library.offers import dropped_paths
from kvscope_app.look.makers import label
from kvscope_app.look.number_text import plural
from kvscope_app.look.zoom import scaled

_AROUND: Final = 18


class DropSign(QFrame):
    """Over `window`, hidden until `offer`. Whatever is dropped on it is dropped on the window."""

    def __init__(self, window: QWidget) -> None:
        super().__init__(window)
        self.setProperty("look", "drop")
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self._words, self._more = label(look="heading"), label(look="muted")
        column = QVBoxLayout(self)
        column.addStretch(1)
        for words in (self._words, self._more):
            words.setAlignment(Qt.AlignmentFlag.AlignCenter)
            column.addWidget(words)
        column.addStretch(1)
        self.hide()

    def offer(self, data: QMimeData) -> None:
        """Say what dropping `data` does."""
        good, others = dropped_paths(data)
        names = Path(good[0]).name if len(good) == 1 else plural(len(good), "recording")
        self._words.setText(f"Drop to open {names}" if good else "Not a recording")
        wider = "Each opens in its own window" if len(good) > 1 else "Opens in its own window"
        self._more.setText(wider if good else f"{plural(len(others), 'file')} whose name does not end in .mcap")
        around = scaled(_AROUND)
        self.setGeometry(self.window().rect().adjusted(around, around, -around, -around))
        self.raise_()
        self.show()

    @property
    def text(self) -> str:
        """What is said, empty when nothing is dragged."""
        return "" if self.isHidden() else self._words.text()
