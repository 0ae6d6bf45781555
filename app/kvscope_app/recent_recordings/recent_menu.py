"""The menu "File > Open recent"."""

from __future__ import annotations

from functools import partial
from typing import Final

from PySide6.QtWidgets import QMenu

from kvscope_app.recent_recordings.open_file import try_to_open
from kvscope_app.recent_recordings.recent_files import existing_file
from kvscope_app.session.background import Background
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.plain_text import plain_tip

_MAX_WAIT_S: Final = 0.05
"""Maximum seconds that opening the menu waits for disks."""


class RecentMenu(QMenu):
    """Submenu of the recent recordings, newest first. Missing files are disabled.

    Another thread checks which files exist, because a network disk may not respond. Files that were not checked in time
    stay enabled.
    """

    def __init__(self, window: SessionWindow, parent: QMenu) -> None:
        super().__init__("Open recent", parent)
        self._window = window
        self.setToolTipsVisible(True)
        self.aboutToShow.connect(self._fill)

    def _fill(self) -> None:
        self.clear()
        paths = self._window.themes.settings.values.recent_recordings
        check = Background(lambda _: [existing_file(path) for path in paths], "kvscope-recent-files")
        check.wait(_MAX_WAIT_S)
        for path, existing_path in zip(paths, check.result or paths, strict=True):
            action = self.addAction(path.rpartition("/")[2].replace("&", "&&"))
            action.setToolTip(plain_tip(path if existing_path else f"{path}\nThe file is missing."))
            action.setEnabled(bool(existing_path))
            action.triggered.connect(partial(self._choose, existing_path))
        if not paths:
            self.addAction("No recent recordings").setEnabled(False)
        self.addSeparator()
        clear = self.addAction("Clear list")
        clear.setEnabled(bool(paths))
        clear.triggered.connect(self._clear)

    def _choose(self, path: str, _checked: bool = False) -> None:
        try_to_open(self._window, path)

    def _clear(self) -> None:
        self._window.themes.settings.change(recent_recordings=())
