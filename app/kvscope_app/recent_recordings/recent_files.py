"""Paths of recently opened or made recordings, as stored in the settings, and the folder of recordings.

Contains no widgets, and accesses no files except in `existing_file`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from PySide6.QtCore import QStandardPaths

from kvscope_app.settings.settings import Settings
from kvscope_app.settings.settings_store import SettingsStore
from kvscope_telemetry.recordings.layout import PART_SUFFIX

MAX_RECENT: Final = 10


def add_recent(settings: SettingsStore, path: Path | str) -> None:
    """Put the recording at `path` first in the list of recent recordings.

    A file that is still being written is listed under its final name.
    """
    recent_path = os.path.abspath(path).removesuffix(PART_SUFFIX)

    def changes(settings_values: Settings) -> dict[str, object]:
        others = [each for each in settings_values.recent_recordings if each != recent_path]
        return {"recent_recordings": (recent_path, *others)[:MAX_RECENT]}

    settings.change_by(changes)


def existing_file(path: str) -> str:
    """Return the existing file for the recent recording `path`, or "" if there is none.

    While a recording is being written, and if it was truncated, the file has `PART_SUFFIX`. Not for the GUI thread,
    because disk access can block.
    """
    return next((candidate for candidate in (path, path + PART_SUFFIX) if os.path.exists(candidate)), "")


def recording_folder(settings: Settings) -> Path:
    """Return the folder in which the last recording was saved, or the documents folder. The folder may no
    longer exist.
    """
    return Path(settings.recording_folder) if settings.recording_folder else documents_folder()


def documents_folder() -> Path:
    return Path(QStandardPaths.writableLocation(QStandardPaths.StandardLocation.DocumentsLocation))
