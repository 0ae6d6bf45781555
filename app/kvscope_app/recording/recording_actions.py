"""Actions to record a live session: save recent history, start or stop a recording, and set the history length."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from PySide6.QtCore import QObject, Qt, QTimer
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QMenu, QProgressDialog

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.recent_recordings.recent_files import add_recent, documents_folder, recording_folder
from kvscope_app.recording.history_dialogs import HistoryLengthDialog, SaveHistoryDialog
from kvscope_app.recording.text_consent import ask_once, text_actions
from kvscope_app.session.background import Background
from kvscope_app.session.state_text import history_failure_text
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.file_dialogs import ask_save
from kvscope_app.ui.model_name import model_name
from kvscope_telemetry.errors import BadInput

_FILES: Final = "Recordings (*.mcap)"
_POLL_MS: Final = 50
_DIALOG_AFTER_MS: Final = 500
HISTORY_NOT_STORED: Final = "The session continues. File ▸ Start recording… can write to a disk with free space."
_NOT_SAVED: Final = "The recent history could not be saved"
_NOTICE_MS: Final = 8000
_WRITTEN_MS: Final = 10_000
_MINUTES: Final = 2.0
"""Proposed length of the saved history; more if the shown time is further back."""
_MINUTES_BEFORE: Final = 0.5
"""Additional time before the shown time."""
_LOW_DISK_SHARE: Final = 0.05
"""Minutes behind the present that are not worth mentioning."""
_STEPS: Final = 1000


def recording_actions(window: SessionWindow, group: str) -> list[ActionSpec]:
    """Return the actions that record a live session; none for a window of a recording."""
    session = window.session
    if session.timeline.is_file:
        return []
    return [
        ActionSpec(
            "record",
            "Start recording…",
            group,
            partial(toggle_recording, window),
            ("Ctrl+R",),
            "record",
            checkable=True,
            starts_section=True,
            tip="Record to a file, or stop recording",
            checked=lambda: session.recorder is not None,
            text_now=lambda: "Start recording…" if session.recorder is None else "Stop recording",
        ),
        ActionSpec("keep_last", "Save recent history…", group, partial(ask_minutes, window), ("Ctrl+S",)),
        ActionSpec("kept_bounds", "History length…", group, partial(_ask_bounds, window)),
        *text_actions(window, group),
    ]


def toggle_recording(window: SessionWindow, _checked: bool = False) -> None:
    """Stop the running recording, or ask where to record to."""
    if window.session.recorder is not None:
        stop_recording(window)
    else:
        ask_recording(window)
    window.actions_by_name.refresh()  # the action is checked while a recording runs, not while a dialog asks


def recording_menu(window: SessionWindow) -> QMenu:
    """Return a menu of the running recording: its path, and an entry to stop it."""
    menu = QMenu(window)
    menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    recorder = window.session.recorder
    path = "" if recorder is None else str(recorder.path)
    menu.addAction(path.replace("&", "&&")).setEnabled(False)
    menu.addAction("Copy path").triggered.connect(lambda: QGuiApplication.clipboard().setText(path))
    menu.addAction(window.actions_by_name["record"])
    return menu


def free_path(window: SessionWindow) -> Path:
    """Return an unused path from model name and time, in the folder of the last recording or the documents folder."""
    last = recording_folder(window.themes.settings.values)
    folder = last if last.is_dir() else documents_folder()
    model = re.sub(r"[^\w.-]+", "-", model_name(window.session.live_mirror.hello)).strip("-")[:100] or "kvscope"
    stem = f"{model}-{time.strftime('%Y%m%d-%H%M')}"
    names = (f"{stem}.mcap", *(f"{stem}-{number}.mcap" for number in range(2, 1000)))
    paths = (folder / name for name in names)
    return next(
        (path for path in paths if not path.exists() and not path.with_name(path.name + ".part").exists()), folder
    )


def ask_minutes(window: SessionWindow) -> None:
    """Ask how many minutes to save, then for the path. The first time, also ask whether to include texts."""
    ask_once(window, partial(_ask_minutes, window))


def _ask_minutes(window: SessionWindow) -> None:
    timeline = window.session.timeline
    around = timeline.range_ns
    if window.session.disk_history is None or around is None:
        window.statusBar().showMessage("No history yet", _NOTICE_MS)
        return
    kept = window.session.disk_history
    if kept.failure and not kept.ring.num_bytes:
        window.banner.show_message(history_failure_text(kept.failure, has_some=False), HISTORY_NOT_STORED)
        return
    there, ago = max((around[1] - around[0]) / 60e9, 0.1), max((around[1] - timeline.cursor_ns) / 60e9, 0.0)
    asked_s = time.monotonic()
    dialog = SaveHistoryDialog(window, minutes_question(there, ago), minutes_offered(there, ago), there)
    dialog.chosen.connect(
        lambda minutes: _ask_path(window, lambda path: keep_since(window, asked_s - minutes * 60.0, path))
    )
    dialog.open()


def minutes_offered(there: float, ago: float) -> float:
    """Return the proposed minutes: enough to include the shown time, which was `ago` minutes back, at most `there`."""
    return min(max(_MINUTES, ago + _MINUTES_BEFORE), there)


def minutes_question(there: float, ago: float) -> str:
    """Return the dialog's text. Both arguments are in minutes."""
    question = f"Save the last … minutes ({there:.1f} available):"
    return f"What is shown was {ago:.1f} minutes ago.\n{question}" if ago >= _LOW_DISK_SHARE else question


def ask_recording(window: SessionWindow) -> None:
    """Ask where to record to. The first time, also ask whether to include texts."""
    ask_once(window, lambda: _ask_path(window, partial(record, window)))


def keep_since(window: SessionWindow, since_s: float, path: str) -> Task | None:
    """Save everything since `since_s` (monotonic clock), which does not depend on how long choosing the path takes."""
    return keep_last(window, time.monotonic() - since_s, path)


def keep_last(window: SessionWindow, seconds: float, path: str) -> Task | None:
    """Save the last `seconds` to `path` on a thread. Returns None without a history."""
    kept = window.session.disk_history
    if kept is None:
        return None
    work = kept.save(_with_ending(path), seconds)

    def done() -> None:
        if work.result is not None:
            window.banner.withdraw(_NOT_SAVED)
            add_recent(window.themes.settings, _with_ending(path))
            made = f"; what is kept here is {work.result}" if work.result else ""
            window.statusBar().showMessage(f"Kept in {_with_ending(path)}{made}", _NOTICE_MS)
        elif work.failure:
            window.banner.show_message(_NOT_SAVED, work.failure, is_temporary=True)

    return Task(window, work, f"Keeping {Path(path).name}", done)


def record(window: SessionWindow, path: str) -> None:
    kept = window.session.disk_history
    if kept is None or kept.recorder is not None:
        return
    try:
        kept.start_recording(_with_ending(path))
        add_recent(window.themes.settings, _with_ending(path))
    except BadInput as error:
        window.banner.show_message("Recording failed", str(error), is_temporary=True)
    window.session.status_changed.emit()


def stop_recording(window: SessionWindow) -> Task | None:
    """Stop the recording. A thread completes the file."""
    work = None if window.session.disk_history is None else window.session.disk_history.stop_recording()
    if work is None:
        return None
    window.session.status_changed.emit()

    def done() -> None:
        if work.result is not None:
            window.statusBar().showMessage(f"Recorded in {work.result}", _NOTICE_MS)
        elif work.failure:
            window.banner.show_message("Recording stopped early", work.failure)

    return Task(window, work, "Finishing the recording", done)


class Task(QObject):
    """Watches `work` on behalf of `window`: shows a cancellable progress dialog if it takes long, and calls `done` at
    the end.
    """

    def __init__(self, window: SessionWindow, work: Background[Any], text: str, done: Callable[[], None]) -> None:
        super().__init__(window)
        self.work, self._done = work, done
        self._dialog = QProgressDialog(text, "Cancel", 0, _STEPS, window)
        self._dialog.setWindowTitle("kvscope")
        self._dialog.setWindowModality(Qt.WindowModality.NonModal)
        self._dialog.setAutoClose(False)
        self._dialog.setAutoReset(False)
        self._dialog.setMinimumDuration(_DIALOG_AFTER_MS)
        self._dialog.canceled.connect(work.cancel)
        self._clock = QTimer(self, interval=_POLL_MS)
        self._clock.timeout.connect(self._poll)
        self._clock.start()
        window.closing.connect(self._cancel)

    def _poll(self) -> None:
        if not self.work.is_finished:
            self._dialog.setValue(min(round(self.work.share * _STEPS), _STEPS - 1))
            return
        self._clock.stop()
        self._done()
        self._dialog.deleteLater()
        self.deleteLater()

    def _cancel(self) -> None:
        self._clock.stop()
        self.work.cancel()
        self.work.wait(2.0)


def write_file(window: SessionWindow, work: Background[Path], path: Path, doing: str, done: str, failed: str) -> Task:
    """Report in the window that `work` has written `path`, or why it failed. Shows progress if it takes long."""

    def show_result() -> None:
        if work.result:
            window.banner.withdraw(failed)
            window.statusBar().showMessage(f"{done} {path}", _WRITTEN_MS)
        elif work.failure:
            window.banner.show_message(failed, work.failure, is_temporary=True)

    return Task(window, work, f"{doing} {path.name}", show_result)


def _ask_path(window: SessionWindow, run: Callable[[str], object]) -> None:
    def chosen(path: str) -> None:
        window.themes.settings.change(recording_folder=str(Path(path).absolute().parent))
        run(path)

    ask_save(window, "Save recording", free_path(window), _FILES, chosen)


def _with_ending(path: str) -> Path:
    return Path(path if path.endswith(".mcap") else f"{path}.mcap")


def _ask_bounds(window: SessionWindow) -> None:
    HistoryLengthDialog(window).open()
