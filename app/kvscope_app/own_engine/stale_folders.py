"""Private folders of the desktops' engines: who they belong to, and the end of those whose owners were killed. No Qt.

Each folder has a file that names the desktop and the engine it is for. It goes when neither of them lives; one that
names nobody is not ours to judge, and stays.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvscope_app.own_engine.process_identity import identity_of, is_alive

PREFIX: Final = "kvscope-"
_OWNERS: Final = "owners"


def claim(folder: Path, pid: int) -> None:
    """`folder` is needed as long as process `pid` lives, and those that claimed it before."""
    with suppress(OSError), (folder / _OWNERS).open("a") as file:  # a full disk: the folder is left behind
        file.write(f"{identity_of(pid)}\n")


def remove_stale(parent: Path) -> list[Path]:
    """Remove the folders in `parent` that are this user's and whose owners are all dead; which they were."""
    gone = [folder for folder in _own_folders(parent) if _is_stale(folder)]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def _own_folders(parent: Path) -> Iterator[Path]:
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                is_ours = status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
                if entry.name.startswith(PREFIX) and is_ours:
                    yield Path(entry.path)


def _is_stale(folder: Path) -> bool:
    try:
        owners = (folder / _OWNERS).read_text().split()
    except (OSError, UnicodeDecodeError):
        return False
    return bool(owners) and not any(is_alive(owner) for owner in owners)
