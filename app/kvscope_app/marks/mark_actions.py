"""What a person does with bookmarks, loops and alarms, from menus and keys."""

from __future__ import annotations

import shlex
from functools import partial
from typing import Final

from PySide6.QtGui import QGuiApplication

from kvscope_app.library.sample import SAMPLE_WORD, is_sample
from kvscope_app.marks.alarm_sheet import AlarmSheet
from kvscope_app.marks.note_popup import NotePopup
from kvscope_app.playback.mark_words import mark_text
from kvscope_app.playback.playback_actions import TIME
from kvscope_app.session.session import Session
from kvscope_app.window.actions import ActionSpec
from kvscope_app.window.window_body import WindowBody
from kvscope_telemetry.summaries.bookmark import Bookmark

_NOTICE_MS: Final = 5000
_ABOVE_BAR: Final = 48


def mark_actions(window: WindowBody) -> list[ActionSpec]:
    """Bookmarks, loops, alarms."""
    jump = partial(go_to_bookmark, window)
    return [
        ActionSpec("bookmark", "Bookmark this moment", TIME, partial(bookmark_here, window), ("Ctrl+B",), "bookmark"),
        ActionSpec("bookmark_before", "To the bookmark before", TIME, partial(jump, forward=False), ("Alt+,",)),
        ActionSpec("bookmark_next", "To the next bookmark", TIME, partial(jump, forward=True), ("Alt+.",)),
        ActionSpec("bookmark_undo", "Bring back the deleted bookmark", TIME, partial(bring_back, window)),
        ActionSpec("loop_begin", "Loop from here", TIME, partial(set_loop, window, is_begin=True), ("Ctrl+[",)),
        ActionSpec("loop_end", "Loop until here", TIME, partial(set_loop, window, is_begin=False), ("Ctrl+]",)),
        ActionSpec("loop_clear", "End the loop", TIME, window.session.loop.clear, tip="End the loop: Esc does as well"),
        ActionSpec("copy_moment", "Copy link to this moment", TIME, partial(copy_moment, window)),
        ActionSpec("alarm_rules", "Alarms…", TIME, partial(edit_rules, window), icon="warning"),
    ]


def offer_undo(window: WindowBody) -> None:
    """Undo brings back bookmarks that were deleted."""
    bookmarks = window.session.bookmarks

    def note(gone: list[Bookmark]) -> None:
        if not window.undo.is_at_work:
            words = "deleting the bookmark" if len(gone) == 1 else f"deleting {len(gone)} bookmarks"
            window.undo.did(words, partial(bookmarks.restore, gone), partial(bookmarks.delete, gone))

    bookmarks.deleted.connect(note)
    window.closing.connect(lambda _: bookmarks.deleted.disconnect(note))


def bookmark_here(window: WindowBody) -> None:
    """Mark what is shown, at once; words can follow."""
    session = window.session
    if session.timeline_range_ns is None:
        _tell(window, "There is nothing to bookmark yet")
        return
    made = session.bookmarks.add(session.cursor_ns)
    NotePopup(window.centralWidget() or window, session.bookmarks, made).show_above(_ABOVE_BAR)


def go_to_bookmark(window: WindowBody, *, forward: bool) -> None:
    """The next, or the one before."""
    session = window.session
    found = session.bookmarks.nearest(session.cursor_ns, forward=forward)
    if found is None:
        _tell(window, f"There is no bookmark {'after' if forward else 'before'} this")
        return
    session.go_to(found.time_ns)
    _tell(window, mark_text(found))


def bring_back(window: WindowBody) -> None:
    """The bookmark that was deleted last."""
    back = window.session.bookmarks.undo()
    _tell(window, "No bookmark was deleted" if back is None else f"Back again: {mark_text(back)}")


def copy_moment(window: WindowBody) -> None:
    """The command that opens the recording where it is now, to the clipboard."""
    session, player = window.session, window.session.player
    if player is None or not session.is_file:
        _tell(window, "Only a moment of a recording can be linked to: save recent history first (Ctrl+S)")
        return
    path = player.recording.path
    file = SAMPLE_WORD if is_sample(path) else shlex.quote(str(path.absolute()))
    at_s = max(session.cursor_ns - player.recording.start_ns, 0) / 1e9
    link = f"kvscope --open {file} --at {at_s:.3f}"
    QGuiApplication.clipboard().setText(link)
    _tell(window, f"Copied: {link}")


def set_loop(window: WindowBody, *, is_begin: bool) -> None:
    """One end of it here. With both it is played, from its begin on."""
    session, loop = window.session, window.session.loop
    if session.timeline_range_ns is None:
        _tell(window, "There is nothing to loop yet")
        return
    loop.set_bound(session.cursor_ns, is_begin=is_begin)
    if loop.range_ns is None:
        _tell(window, f"Now set its {'end' if is_begin else 'begin'}: Ctrl+{']' if is_begin else '['}")
    else:
        _tell(window, "Played over and over until Esc")


def clear_choice(session: Session) -> None:
    """What Esc does: the loop ends, or nothing is selected any more."""
    if not session.loop.clear():
        session.clear_selection()


def edit_rules(window: WindowBody) -> None:
    """Which alarms ring, and when."""
    AlarmSheet(window.alarms, window).show()


def _tell(window: WindowBody, text: str) -> None:
    window.statusBar().showMessage(text, _NOTICE_MS)
