"""Location and size limits of the rings of live sessions, and cleanup after crashes. Contains no widgets."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QSettings, QStandardPaths

from kvscope_app.session.background import Background
from kvscope_app.settings.settings_store import read_settings

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.orphaned_rings import RemovedRings
    from kvscope_telemetry.recordings.ring_client import RingClient

_numbers = itertools.count(1)


def rings_folder() -> Path:
    """Return the parent folder of all rings, in the user's cache folder. Each live session has its own folder there."""
    cache = QStandardPaths.writableLocation(QStandardPaths.StandardLocation.GenericCacheLocation)
    return Path(cache) / "kvscope" / "rings"


def ring_limits(settings: QSettings) -> tuple[int, int]:
    """Return the maximum (minutes, megabytes) of a ring."""
    values = read_settings(settings)
    return values.timeline_minutes, values.timeline_megabytes


def make_ring(settings: QSettings, past_s: int = 0) -> RingClient:
    """Create the ring of a new session, which another process writes. Errors with the folder are reported in its
    `failure`.

    `past_s`: seconds before the session for which the ring needs capacity, too.
    """
    from kvscope_telemetry.credentials.private_files import make_private_folder
    from kvscope_telemetry.errors import BadInput
    from kvscope_telemetry.recordings.ring_client import RingClient

    minutes, megabytes = ring_limits(settings)
    parent = rings_folder()
    try:
        make_private_folder(parent.parent, "cache folder")
        make_private_folder(parent, "ring folder")
    except BadInput:
        pass  # the ring reports it for its own folder, or can be created nevertheless
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_numbers)}"
    return RingClient(folder, max_bytes=megabytes << 20, max_seconds=minutes * 60.0 + past_s)


def find_orphaned_rings() -> Background[RemovedRings]:
    """Find the rings of crashed sessions on a thread, newest first, and delete rings that are too old or too large."""
    parent = rings_folder()

    def find(_: object) -> RemovedRings:
        from kvscope_telemetry.recordings.orphaned_rings import remove_orphaned_rings

        return remove_orphaned_rings(parent)

    return Background(find, "kvscope-left")
