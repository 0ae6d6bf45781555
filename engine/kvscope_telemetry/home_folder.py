"""Sets a home folder for processes without one: a container's user may have neither HOME nor an entry in passwd."""

from __future__ import annotations

import os
from pathlib import Path

from kvscope_telemetry.credentials.private_files import make_private_folder
from kvscope_telemetry.operating_system import shared_folder


def ensure_home() -> None:
    """Set HOME to a private folder below /tmp if the user has no home.

    Libraries handle a missing home differently: Qt uses /, and Python raises RuntimeError. Raises BadInput if the
    folder belongs to another user.
    """
    try:
        Path.home()
    except RuntimeError:
        folder = shared_folder()
        make_private_folder(folder, "home folder")
        os.environ["HOME"] = str(folder)
