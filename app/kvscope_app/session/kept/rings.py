"""Where live sessions keep their past, how much of it, and what crashed ones left there. Knows no window."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QSettings, QStandardPaths

from kvscope_app.session.background import Background
from kvscope_app.settings.settings_keeper import read_settings

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.left_rings import TidiedRings
    from kvscope_telemetry.recordings.ring_client import RingClient

_numbers = itertools.count(1)


def rings_folder() -> Path:
    """In the user's cache folder; one folder a live session in it."""
    cache = QStandardPaths.writableLocation(QStandardPaths.StandardLocation.GenericCacheLocation)
    return Path(cache) / "kvscope" / "rings"


def kept_bounds(settings: QSettings) -> tuple[int, int]:
    """Minutes and megabytes that are kept at most."""
    chosen = read_settings(settings)
    return chosen.timeline_minutes, chosen.timeline_megabytes


def make_ring(settings: QSettings) -> RingClient:
    """The ring of a session that begins now; another process writes it. What is wrong with the folder is told in its
    `failure`."""
    from kvscope_telemetry.errors import BadInput
    from kvscope_telemetry.keys.private_files import make_private_folder
    from kvscope_telemetry.recordings.ring_client import RingClient

    minutes, megabytes = kept_bounds(settings)
    parent = rings_folder()
    try:
        make_private_folder(parent.parent, "cache folder")
        make_private_folder(parent, "ring folder")
    except BadInput:
        pass  # the ring says the same of its own folder, or can be made all the same
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_numbers)}"
    return RingClient(folder, max_bytes=megabytes << 20, max_seconds=minutes * 60.0)


def find_left_rings() -> Background[TidiedRings]:
    """Those of crashed sessions, the newest first; what is too old or too much is deleted."""
    parent = rings_folder()

    def find(_: object) -> TidiedRings:
        from kvscope_telemetry.recordings.left_rings import tidy_left_rings

        return tidy_left_rings(parent)

    return Background(find, "kvscope-left")
