"""Opens recordings that are dropped on a window, and shows an overlay that explains the effect of a drop."""

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
_SUFFIXES: Final = (".mcap", ".mcap.part")
_MAX_NAMES: Final = 3
_MARGIN: Final = 18


def dropped_paths(data: QMimeData) -> tuple[list[str], list[str]]:
    """Return the dragged paths in two lists: paths with a recording's suffix, and all other paths."""
    paths = [url.toLocalFile() if url.isLocalFile() else url.toString() for url in data.urls()]
    good = [path for path in paths if path.endswith(_SUFFIXES)]
    return good, [path for path in paths if path not in good]


def accept_drag(event: QDropEvent) -> None:
    if event.mimeData().hasUrls():
        event.setDropAction(Qt.DropAction.CopyAction)
        event.accept()


def open_dropped(window: SessionWindow, data: QMimeData) -> None:
    """Open the dropped recordings, and list in the banner the files that were not opened."""
    good, others = dropped_paths(data)
    for path in good[:MAX_AT_ONCE]:
        try_to_open(window, path)
    if others:
        names = ", ".join(Path(path).name or path for path in others[:_MAX_NAMES])
        suffix = f" and {len(others) - _MAX_NAMES} more" if len(others) > _MAX_NAMES else ""
        window.banner.show_message(
            "Not a recording", f"{names}{suffix}: only .mcap files can be opened here", is_temporary=True
        )
    elif len(good) > MAX_AT_ONCE:
        window.banner.show_message(
            f"The first {MAX_AT_ONCE} of {len(good)} recordings are opened",
            "Each opens in its own window.",
            is_temporary=True,
        )


class DropOverlay(QFrame):
    """Overlay on `window` that explains the effect of a drop; hidden until `explain_drop`.

    Mouse events pass through to the window, so that drops reach it.
    """

    def __init__(self, window: QWidget) -> None:
        super().__init__(window)
        self.setProperty("look", "drop")
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self._heading, self._detail = label(look="heading"), label(look="muted")
        column = QVBoxLayout(self)
        column.addStretch(1)
        for text_label in (self._heading, self._detail):
            text_label.setAlignment(Qt.AlignmentFlag.AlignCenter)
            column.addWidget(text_label)
        column.addStretch(1)
        self.hide()

    def explain_drop(self, data: QMimeData) -> None:
        good, others = dropped_paths(data)
        names = Path(good[0]).name if len(good) == 1 else plural(len(good), "recording")
        self._heading.setText(f"Drop to open {names}" if good else "Not a recording")
        detail = "Each opens in its own window" if len(good) > 1 else "Opens in its own window"
        self._detail.setText(detail if good else f"{plural(len(others), 'file')} whose name does not end in .mcap")
        margin = scaled(_MARGIN)
        self.setGeometry(self.window().rect().adjusted(margin, margin, -margin, -margin))
        self.raise_()
        self.show()

    @property
    def text(self) -> str:
        """Heading of the overlay; empty while the overlay is hidden."""
        return "" if self.isHidden() else self._heading.text()
