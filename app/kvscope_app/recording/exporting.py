"""A session's time, or a range of it, written for other tools and other people: a thread reads what is played or kept
and writes the file. Owns neither; knows no dialog.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_app.recording.recording_actions import Task
from kvscope_app.session.background import Background
from kvscope_app.session.kept.bookmark_file import bookmark_file, read_bookmarks
from kvscope_app.session.session import Session
from kvscope_app.window.window_body import WindowBody
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.recorded import Recorded
from kvscope_telemetry.recordings.effort import OpeningCancelled, Watch

_FAILED: Final = "That could not be exported"
_NOTICE_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class ExportWish:
    """What to write where. Times are of the wall clock, nanoseconds since 1970; None: from the first, to the last."""

    path: Path
    form: str
    """One of `exports.FORMAT_NAMES`."""
    kind: str | None = None
    """Which table, where it is one."""
    from_ns: int | None = None
    until_ns: int | None = None


def begin_export(window: WindowBody, wish: ExportWish) -> Task:
    """Begin; progress and a way to give it up where it takes long. A file of that name is replaced when it is whole."""
    work = Background(_work(window.session, wish), "kvscope-export")

    def done() -> None:
        if work.made:
            window.banner.withdraw(_FAILED)
            window.statusBar().showMessage(f"Exported to {wish.path}", _NOTICE_MS)
        elif work.failure:
            window.banner.tell(_FAILED, work.failure, passes=True)

    return Task(window, work, f"Exporting {wish.path.name}", done)


def _work(session: Session, wish: ExportWish) -> Callable[[Watch], Path]:
    """What a thread does. Whatever it needs of the session is taken now."""
    kept, marks = session.kept, list(session.bookmarks.shown)
    played = None if session.player is None else session.player.recording

    def work(watch: Watch) -> Path:
        from kvscope_telemetry.exports.export import Wanted, export

        if kept is not None:
            recording: Recorded = kept.read_tape(watch)
        elif played is not None:  # read by its player's thread: this one has its own
            recording = type(played).open(played.path)  # type: ignore[attr-defined]
        else:
            raise KvscopeError("there is nothing kept that could be exported")
        said = marks if kept is not None else [*read_bookmarks(bookmark_file(recording)), *marks]
        with tempfile.TemporaryDirectory(prefix=".kvscope-export-", dir=_folder(wish.path)) as folder:
            wanted = Wanted.of(Path(folder) / wish.path.name, wish.kind, wish.form)
            begin_s, end_s = _seconds(recording, wish.from_ns), _seconds(recording, wish.until_ns)
            export(recording, wanted, begin_s, end_s, watch, said)
            if not watch(1.0):
                raise OpeningCancelled
            os.replace(wanted.path, wish.path)
        return wish.path

    return work


def _folder(path: Path) -> Path:
    if not path.parent.is_dir():
        raise KvscopeError(f"{str(path.parent)!r} is no folder")
    return path.parent


def _seconds(recording: Recorded, time_ns: int | None) -> float | None:
    return None if time_ns is None else max((time_ns - recording.start_ns) / 1e9, 0.0)
