"""Sidecar files with the bookmarks of finished recordings, in the user's data folder.

A finished recording is never rewritten. The file name contains the first epoch and the start time of the recording, so
that a recording that is moved, renamed or recovered keeps its bookmarks. Imports no Qt, because exports without a
window read bookmarks, too.
"""

from __future__ import annotations

from pathlib import Path

from kvscope_telemetry.credentials.private_files import make_private_folder, read_private, write_private
from kvscope_telemetry.errors import BadInput, ProtocolError
from kvscope_telemetry.operating_system import data_folder
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.bookmark import Bookmark, decode_bookmarks, encode_bookmarks, newest_revisions

_FILE_KIND = "file of bookmarks"


def bookmark_file(recording: Recording) -> Path:
    epoch = recording.info.epochs[0] if recording.info.epochs else 0
    return data_folder() / "kvscope" / "bookmarks" / f"{epoch:016x}-{recording.start_ns:016x}.json"


def read_bookmarks(path: Path) -> list[Bookmark]:
    """Return the saved bookmark revisions; empty if there is no file. Raises BadInput for an unreadable file."""
    if not path.exists():
        return []
    try:
        return decode_bookmarks(read_private(path, _FILE_KIND))
    except ProtocolError as error:
        raise BadInput(f"{_FILE_KIND} {path} is not accepted: {error}") from None


def save_bookmarks(path: Path, revisions: list[Bookmark]) -> str:
    """Merge `revisions` into the file, which another window may have written. Returns the error text, empty on
    success.
    """
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(path.parent, "folder of bookmarks")
        newest = newest_revisions([*read_bookmarks(path), *revisions])
        write_private(path, encode_bookmarks(newest.values()), _FILE_KIND)
    except BadInput as error:
        return str(error)
    except OSError as error:
        return f"{_FILE_KIND} {path} cannot be written: {error.strerror}"
    return ""
