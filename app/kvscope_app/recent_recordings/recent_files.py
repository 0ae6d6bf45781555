"""Recently opened or made recordings, as stored in the settings, and the folder of recordings.

No widgets, and no access to the files themselves except in `existing_file`.
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
    """Put the recording at `path` first in the list of recent ones.

    A file that is still being written is listed under its final name.
    """
    added = os.path.abspath(path).removesuffix(PART_SUFFIX)

    def changes(now: Settings) -> dict[str, object]:
        others = [each for each in now.recent_recordings if each != added]
        return {"recent_recordings": (added, *others)[:MAX_RECENT]}

    settings.change_by(changes)


def existing_file(path: str) -> str:
    """Return the file to open for the recent recording `path`, or "" if there is none.

    While a recording is being written, or after it was cut short, that is the file with `PART_SUFFIX`. Disk access can
    block, so do not call this on the GUI thread.
    """
    return next((found for found in (path, path + PART_SUFFIX) if os.path.exists(found)), "")


def recording_folder(settings: Settings) -> Path:
    """Return the folder of the last recording, or the user's documents before the first. It may no longer exist."""
    return Path(settings.recording_folder) if settings.recording_folder else documents_folder()


def documents_folder() -> Path:
    return Path(QStandardPaths.writableLocation(QStandardPaths.StandardLocation.DocumentsLocation))
