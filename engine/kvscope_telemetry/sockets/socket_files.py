"""The files that bound `ipc://` sockets leave on the disk: ZeroMQ closes them and leaves the files behind.

Knows no sockets.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

_SCHEME: Final = "ipc://"


class SocketFiles:
    """Those of one owner's sockets."""

    def __init__(self) -> None:
        self._inodes: dict[Path, int] = {}

    def note(self, endpoint: str) -> None:
        """A socket was bound to `endpoint` just now; on tcp there is no file."""
        if endpoint.startswith(_SCHEME):
            path = Path(endpoint.removeprefix(_SCHEME))
            with contextlib.suppress(OSError):  # an abstract name has no file
                self._inodes[path] = path.stat().st_ino

    def remove(self) -> None:
        """Delete them, once the sockets are closed. One that somebody else put in the place of ours stays."""
        while self._inodes:
            path, inode = self._inodes.popitem()
            with contextlib.suppress(OSError):
                if path.is_socket() and path.stat().st_ino == inode:
                    path.unlink()
