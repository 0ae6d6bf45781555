"""What a window offers of recordings: menu entries, buttons on its first page, and opening files dropped on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import QMimeData, Qt
from PySide6.QtGui import QDropEvent
from PySide6.QtWidgets import QFrame, QVBoxLayout, QWidget

from kvscope_app.look.makers import label
from kvscope_app.look.number_text import plural
from kvscope_app.look.zoom import scaled
from kvscope_app.window.actions import ActionSpec
from kvscope_app.window.open_file import try_to_open
from kvscope_app.window.window_body import WindowBody
from kvscope_telemetry.recordings.sample import HYBRID_TEXT, SAMPLE_TEXT, hybrid_recording, sample_recording

MAX_AT_ONCE: Final = 8
"""Files of one drop that are opened: each gets a window."""
_SUFFIXES: Final = (".mcap", ".mcap.part")
_NAMED: Final = 3
_AROUND: Final = 18
"""Pixels from the window's edges to the sign that files can be dropped."""


def library_actions(window: WindowBody, group: str) -> list[ActionSpec]:
    """Beside "Open recording…"."""
    return [
        ActionSpec(
            "recordings", "Recordings…", group, partial(open_recordings, window), ("Ctrl+Shift+O",), "recordings"
        ),
        ActionSpec("sample", SAMPLE_TEXT, group, partial(open_sample, window, sample_recording), (), "play"),
        ActionSpec("sample_hybrid", HYBRID_TEXT, group, partial(open_sample, window, hybrid_recording), (), "play"),
    ]


def open_recordings(window: WindowBody) -> None:
    """The sheet of all of them."""
    from kvscope_app.library.recordings_sheet import show_recordings  # most windows need none of it

    show_recordings(window)


def open_sample(window: WindowBody, sample: Callable[[], Path]) -> None:
    """In a window of its own, like any file."""
    try_to_open(window, str(sample()))


def offer_recordings(window: WindowBody) -> None:
    """Add these offers to `window`, once it has its actions."""
    for name in ("sample", "recordings"):
        window.welcome.offer(window.actions_by_name[name])
    window.setAcceptDrops(True)


def dropped_paths(data: QMimeData) -> tuple[list[str], list[str]]:
    """Recordings among what is dragged, by their names, and what else there is."""
    paths = [url.toLocalFile() if url.isLocalFile() else url.toString() for url in data.urls()]
    good = [path for path in paths if path.endswith(_SUFFIXES)]
    return good, [path for path in paths if path not in good]


def accept_drag(event: QDropEvent) -> None:
    """Accept a drag with files anywhere over the window."""
    if event.mimeData().hasUrls():
        event.setDropAction(Qt.DropAction.CopyAction)
        event.accept()


def open_dropped(window: WindowBody, data: QMimeData) -> None:
    """Open each recording, and say in one line what was left out."""
    good, others = dropped_paths(data)
    for path in good[:MAX_AT_ONCE]:
        try_to_open(window, path)
    if others:
        names = ", ".join(Path(path).name or path for path in others[:_NAMED])
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        window.banner.tell("Not a recording", f"{names}{more}: only .mcap files can be opened here", passes=True)
    elif len(good) > MAX_AT_ONCE:
        window.banner.tell(
            f"The first {MAX_AT_ONCE} of {len(good)} recordings are opened",
            "Each opens in its own window.",
            passes=True,
        )


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
