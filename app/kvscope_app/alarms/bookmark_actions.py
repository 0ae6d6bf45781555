"""Menu and key actions for bookmarks, loops and alarms."""

from __future__ import annotations

import shlex
from functools import partial
from typing import Final

from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtGui import QFocusEvent, QGuiApplication, QKeyEvent
from PySide6.QtWidgets import QApplication, QFrame, QHBoxLayout, QLineEdit, QWidget

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.alarms.alarm_dialog import AlarmDialog
from kvscope_app.alarms.alarm_evaluator import AlarmEvaluator
from kvscope_app.playback.playback_actions import TIME
from kvscope_app.session.mark_labels import mark_text
from kvscope_app.session.recording.bookmarks import Bookmarks
from kvscope_app.session.session import Session
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.clock_text import wall_text
from kvscope_app.ui.widget_factories import label
from kvscope_telemetry.recordings.sample import sample_name
from kvscope_telemetry.summaries.bookmark import MAX_TEXT, Bookmark

_WIDTH: Final = 440
_USER_FOCUS_REASONS: Final = (
    Qt.FocusReason.MouseFocusReason,
    Qt.FocusReason.TabFocusReason,
    Qt.FocusReason.BacktabFocusReason,
    Qt.FocusReason.ShortcutFocusReason,
)
_NOTICE_MS: Final = 5000
_HEIGHT_ABOVE_BAR: Final = 48


def bookmark_actions(window: SessionWindow, alarms: AlarmEvaluator) -> list[ActionSpec]:
    jump, loop = partial(seek_bookmark, window), window.session.timeline.loop
    return [
        ActionSpec(
            "bookmark",
            "Bookmark this moment",
            TIME,
            partial(bookmark_here, window),
            ("Ctrl+B",),
            "bookmark",
            starts_section=True,
        ),
        ActionSpec("bookmark_before", "Previous bookmark", TIME, partial(jump, forward=False), ("Alt+,",)),
        ActionSpec("bookmark_next", "Next bookmark", TIME, partial(jump, forward=True), ("Alt+.",)),
        ActionSpec(
            "bookmark_undo",
            "Restore deleted bookmark",
            TIME,
            partial(restore_bookmark, window),
            enabled=lambda: window.session.bookmarks.can_undo,
        ),
        ActionSpec(
            "loop_begin",
            "Set loop start",
            TIME,
            partial(set_loop, window, is_begin=True),
            ("Ctrl+[",),
            starts_section=True,
        ),
        ActionSpec("loop_end", "Set loop end", TIME, partial(set_loop, window, is_begin=False), ("Ctrl+]",)),
        ActionSpec(
            "loop_clear",
            "Clear loop",
            TIME,
            loop.clear,
            tip="Clear the loop (also Esc)",
            enabled=lambda: (loop.begin_ns, loop.end_ns) != (None, None),
        ),
        ActionSpec("copy_moment", "Copy link to this moment", TIME, partial(copy_moment, window)),
        ActionSpec(
            "alarm_rules", "Alarms…", TIME, partial(edit_rules, window, alarms), icon="warning", starts_section=True
        ),
    ]


def make_deletions_undoable(window: SessionWindow) -> None:
    bookmarks = window.session.bookmarks

    def push_undo(removed: list[Bookmark]) -> None:
        if not window.undo.is_applying:
            text = "deleting the bookmark" if len(removed) == 1 else f"deleting {len(removed)} bookmarks"
            window.undo.push_done(text, partial(bookmarks.restore, removed), partial(bookmarks.delete, removed))

    bookmarks.deleted.connect(push_undo)
    window.closing.connect(lambda _: bookmarks.deleted.disconnect(push_undo))


def bookmark_here(window: SessionWindow) -> None:
    """Add a bookmark at the time shown, then ask for an optional note."""
    session = window.session
    if session.timeline.range_ns is None:
        _show_message(window, "Nothing to bookmark yet")
        return
    bookmark = session.bookmarks.add(session.timeline.cursor_ns)
    BookmarkNotePopup(window.centralWidget() or window, session.bookmarks, bookmark).show_above(_HEIGHT_ABOVE_BAR)


def seek_bookmark(window: SessionWindow, *, forward: bool) -> None:
    session = window.session
    bookmark = session.bookmarks.nearest(session.timeline.cursor_ns, forward=forward)
    if bookmark is None:
        _show_message(window, f"No bookmark {'after' if forward else 'before'} this one")
        return
    session.timeline.go_to(bookmark.time_ns)
    _show_message(window, mark_text(bookmark))


def restore_bookmark(window: SessionWindow) -> None:
    bookmark = window.session.bookmarks.undo()
    _show_message(window, "No bookmark was deleted" if bookmark is None else f"Restored: {mark_text(bookmark)}")


def copy_moment(window: SessionWindow) -> None:
    """Copy a `kvscope --open` command that opens the recording at this moment, with the current selection."""
    session, timeline = window.session, window.session.timeline
    player = timeline.player
    if player is None or not timeline.is_file:
        _show_message(window, "Only recordings can be linked to: save recent history first (Ctrl+S)")
        return
    path = player.recording.path
    file = sample_name(path) or shlex.quote(str(path.absolute()))
    at_s = max(timeline.cursor_ns - player.recording.start_ns, 0) / 1e9
    link = f"kvscope --open {file} --at {at_s:.3f}{_selection_text(session)}"
    QGuiApplication.clipboard().setText(link)
    _show_message(window, f"Copied: {link}")


def _selection_text(session: Session) -> str:
    selected = (("request", session.selection.request), ("block", session.selection.block))
    return "".join(f" --select {kind}:{number}" for kind, number in selected if number is not None)


def set_loop(window: SessionWindow, *, is_begin: bool) -> None:
    """Set the start or end of the loop to the time shown. With both ends set, the loop plays from its start."""
    timeline, loop = window.session.timeline, window.session.timeline.loop
    if timeline.range_ns is None:
        _show_message(window, "Nothing to loop yet")
        return
    loop.set_bound(timeline.cursor_ns, is_begin=is_begin)
    if loop.range_ns is None:
        _show_message(window, f"Now set its {'end' if is_begin else 'begin'}: Ctrl+{']' if is_begin else '['}")
    else:
        _show_message(window, "Repeats until Esc")


def clear_loop_or_selection(session: Session) -> None:
    """End the loop or, if there is none, clear the selection. Action of the Esc key."""
    if not session.timeline.loop.clear():
        session.selection.clear()


def edit_rules(window: SessionWindow, alarms: AlarmEvaluator) -> None:
    AlarmDialog(alarms, window.themes.theme, window).show()


def _show_message(window: SessionWindow, text: str) -> None:
    window.statusBar().showMessage(text, _NOTICE_MS)


class BookmarkNotePopup(QFrame):
    """Popup that asks for the note of a bookmark that was just added. Esc leaves the bookmark without a note.

    Covers the lower edge of `parent`. Closes on Enter, Esc, and the next click elsewhere.
    """

    def __init__(self, parent: QWidget, bookmarks: Bookmarks, bookmark: Bookmark) -> None:
        super().__init__(parent)
        self._covered_widget = parent
        self._bookmarks, self._bookmark = bookmarks, bookmark
        self._focus_before = QApplication.focusWidget()
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setProperty("look", "card")
        self.setAccessibleName("Bookmark note")
        self.note = QLineEdit()
        self.note.setMaxLength(MAX_TEXT)
        self.note.setPlaceholderText("Note (optional); Enter saves")
        self.note.setAccessibleName("Note")
        self.note.installEventFilter(self)
        self.note.returnPressed.connect(self._save)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 8, 12, 8)
        row.addWidget(label(f"Bookmark at {wall_text(bookmark.time_ns)}", "heading"))
        row.addWidget(self.note, 1)

    def show_above(self, height: int) -> None:
        size = self._covered_widget.size()
        self.resize(min(_WIDTH, size.width()), self.sizeHint().height())
        self.move((size.width() - self.width()) // 2, max(0, size.height() - height - self.height()))
        self.show()
        self.raise_()
        self.note.setFocus()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Handle Esc in the note, so that it does not trigger the window's Esc action."""
        is_escape = isinstance(event, QKeyEvent) and event.key() == Qt.Key.Key_Escape
        if is_escape and event.type() == QEvent.Type.ShortcutOverride:
            event.accept()
            return True
        if is_escape and event.type() == QEvent.Type.KeyPress:
            self._leave()
            return True
        if isinstance(event, QFocusEvent) and event.lostFocus() and event.reason() in _USER_FOCUS_REASONS:
            self.close()
        return False

    def _save(self) -> None:
        if self.note.text().strip():
            self._bookmarks.rename(self._bookmark, self.note.text())
        self._leave()

    def _leave(self) -> None:
        if self._focus_before is not None and self._focus_before.isVisible():
            self._focus_before.setFocus()
        self.close()
