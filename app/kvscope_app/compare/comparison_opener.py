"""Asks for the recording to compare with, and opens both timelines without blocking the window."""

from __future__ import annotations

from functools import partial
from typing import Final

from kvscope_app.recent_recordings.open_file import FILES, try_to_open
from kvscope_app.recent_recordings.recent_files import recording_folder
from kvscope_app.recording.recording_actions import Task
from kvscope_app.session.background import Background
from kvscope_app.session.session import Session
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.file_dialogs import ask_open
from kvscope_telemetry.recordings.reader import Recording

_NOTICE_MS: Final = 6000


def ask_other(window: SessionWindow) -> None:
    """Ask for a recording to compare with the window's session. Does not block."""
    if not has_past(window.session):
        window.statusBar().showMessage("This session has no history to compare yet", _NOTICE_MS)
        return
    folder = str(recording_folder(window.themes.settings.values))
    ask_open(window, "Compare with a recording", folder, FILES, partial(compare_with, window))


def has_past(session: Session) -> bool:
    return session.timeline.range_ns is not None


def compare_with(window: SessionWindow, path: str) -> None:
    """Open a comparison window with the window's own timeline as run A and the recording `path` as run B."""
    try_to_open(window, path, partial(_open_own, window))


def _open_own(window: SessionWindow, other: Recording) -> None:
    work = _open_second_handle(window.session)

    def on_opened() -> None:
        if work.result is not None and window.openers.compare is not None:
            window.openers.compare(work.result, other, window)
        elif work.failure:
            window.banner.show_message("These recordings cannot be compared", work.failure, is_temporary=True)

    Task(window, work, "Opening the timeline", on_opened)


def _open_second_handle(session: Session) -> Background[Recording]:
    """Open a second handle on the session's recording in the background. A handle may be read by only one thread."""
    handle = session.new_recording_handle()
    assert handle is not None, "a session without a past"
    return Background(handle.get, "kvscope-compare")
