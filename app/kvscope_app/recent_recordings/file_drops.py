"""Opens recordings that are dropped on a window, and shows a sign that explains what dropping does."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from PySide6.QtCore import QMimeData, Qt
from PySide6.QtGui import QDropEvent
from PySide6.QtWidgets import QFrame, QVBoxLayout, QWidget

from kvscope_app.recent_recordings.open_file import try_to_open
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.number_text import plural
from kvscope_app.ui.widget_factories import label
from kvscope_app.ui.zoom import scaled

MAX_AT_ONCE: Final = 8
"""Maximum number of files of one drop that are opened; each gets its own window."""
_SUFFIXES: Final = (".mcap", ".mcap.part")
_NAMED: Final = 3
_AROUND: Final = 18
"""Pixels from the window's edges to the sign that files can be dropped."""


def dropped_paths(data: QMimeData) -> tuple[list[str], list[str]]:
    """Return the dragged paths: those with a recording's suffix, and all others."""
    paths = [url.toLocalFile() if url.isLocalFile() else url.toString() for url in data.urls()]
    good = [path for path in paths if path.endswith(_SUFFIXES)]
    return good, [path for path in paths if path not in good]


def accept_drag(event: QDropEvent) -> None:
    """Accept a drag with files anywhere over the window."""
    if event.mimeData().hasUrls():
        event.setDropAction(Qt.DropAction.CopyAction)
        event.accept()


def open_dropped(window: SessionWindow, data: QMimeData) -> None:
    """Open each recording, and report in the banner what was left out."""
    good, others = dropped_paths(data)
    for path in good[:MAX_AT_ONCE]:
        try_to_open(window, path)
    if others:
        names = ", ".join(Path(path).name or path for path in others[:_NAMED])
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        window.banner.show_message(
            "Not a recording", f"{names}{more}: only .mcap files can be opened here", is_temporary=True
        )
    elif len(good) > MAX_AT_ONCE:
        window.banner.show_message(
            f"The first {MAX_AT_ONCE} of {len(good)} recordings are opened",
            "Each opens in its own window.",
            is_temporary=True,
        )


class DropSign(QFrame):
    """Overlay on `window` that shows what a drop would do; hidden until `offer`. Ignores the mouse, so that drops reach
    the window.
    """

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
        """Show what dropping `data` does."""
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
        """The text shown, empty if nothing is dragged."""
        return "" if self.isHidden() else self._words.text()
