"""What a window offers of recordings without a menu: buttons on its first page, and files dropped on it are opened."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from PySide6.QtCore import QMimeData, Qt
from PySide6.QtGui import QDropEvent

from kvscope_app.window.open_file import try_to_open
from kvscope_app.window.window_body import WindowBody

MAX_AT_ONCE: Final = 8
"""Files of one drop that are opened: each gets a window."""
_SUFFIXES: Final = (".mcap", ".mcap.part")
_NAMED: Final = 3


def offer_recordings(window: WindowBody) -> None:
    """Once `window` has its actions."""
    for name in ("sample", "recordings"):
        window.welcome.offer(window.actions_by_name[name])
    window.setAcceptDrops(True)


def dropped_paths(data: QMimeData) -> tuple[list[str], list[str]]:
    """Recordings among what is dragged, by their names, and what else there is."""
    paths = [url.toLocalFile() if url.isLocalFile() else url.toString() for url in data.urls()]
    good = [path for path in paths if path.endswith(_SUFFIXES)]
    return good, [path for path in paths if path not in good]


def accept_drag(event: QDropEvent) -> None:
    """Something is dragged over a window: files may be dropped, wherever on it."""
    if event.mimeData().hasUrls():
        event.setDropAction(Qt.DropAction.CopyAction)
        event.accept()


def open_dropped(window: WindowBody, data: QMimeData) -> None:
    """Open each recording; say what was left out, in a line."""
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
