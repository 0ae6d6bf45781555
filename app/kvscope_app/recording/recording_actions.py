"""Actions to record a live session: save recent history, start or stop a recording, and set the history length."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QMenu, QProgressDialog

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.recent_recordings.recent_files import add_recent, documents_folder, recording_folder
from kvscope_app.recording.history_dialogs import HistoryLengthDialog, SaveHistoryDialog
from kvscope_app.recording.text_consent import ask_once, text_actions
from kvscope_app.session.background import Background
from kvscope_app.session.background_watch import BackgroundWatch
from kvscope_app.session.state_text import history_failure_text
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.file_dialogs import ask_save
from kvscope_app.ui.model_name import model_name
from kvscope_telemetry.errors import BadInput

_FILES: Final = "Recordings (*.mcap)"
_DIALOG_DELAY_MS: Final = 500
HISTORY_NOT_STORED: Final = "The session continues. File ▸ Start recording… can write to a disk with free space."
_NOT_SAVED: Final = "The recent history could not be saved"
_NOTICE_MS: Final = 8000
_WRITTEN_MS: Final = 10_000
_DEFAULT_MINUTES: Final = 2.0
"""Proposed length of the saved history in minutes. A longer one is proposed if the shown time is further back."""
_MARGIN_MINUTES: Final = 0.5
"""Minutes before the shown time that the proposed history includes."""
_MIN_MENTIONED_MINUTES: Final = 0.05
"""Minimum minutes between the shown time and the present for the dialog's question to mention the shown time."""
_STEPS: Final = 1000


def recording_actions(window: SessionWindow, group: str) -> list[ActionSpec]:
    """Return the actions that record a live session. Empty for a window that plays a recording."""
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
        ActionSpec("keep_last", "Save recent history…", group, partial(ask_history_to_save, window), ("Ctrl+S",)),
        ActionSpec("kept_bounds", "History length…", group, partial(_ask_history_length, window)),
        *text_actions(window, group),
    ]


def toggle_recording(window: SessionWindow, _checked: bool = False) -> None:
    """Stop the running recording, or else ask for the path of a new one."""
    if window.session.recorder is not None:
        stop_recording(window)
    else:
        ask_recording(window)
    window.actions_by_name.refresh()  # the action is checked while a recording runs, not while a dialog asks


def recording_menu(window: SessionWindow) -> QMenu:
    menu = QMenu(window)
    menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    recorder = window.session.recorder
    path = "" if recorder is None else str(recorder.path)
    menu.addAction(path.replace("&", "&&")).setEnabled(False)
    menu.addAction("Copy path").triggered.connect(lambda: QGuiApplication.clipboard().setText(path))
    menu.addAction(window.actions_by_name["record"])
    return menu


def free_path(window: SessionWindow) -> Path:
    """Return an unused path, named after the model and the time, in the folder of the last recording or the documents
    folder.
    """
    last_folder = recording_folder(window.themes.settings.values)
    folder = last_folder if last_folder.is_dir() else documents_folder()
    model = re.sub(r"[^\w.-]+", "-", model_name(window.session.live_mirror.hello)).strip("-")[:100] or "kvscope"
    stem = f"{model}-{time.strftime('%Y%m%d-%H%M')}"
    names = (f"{stem}.mcap", *(f"{stem}-{number}.mcap" for number in range(2, 1000)))
    paths = (folder / name for name in names)
    return next(
        (path for path in paths if not path.exists() and not path.with_name(path.name + ".part").exists()), folder
    )


def ask_history_to_save(window: SessionWindow) -> None:
    """Ask how many minutes to save, then for the path. The first time, also ask whether to include texts."""
    ask_once(window, partial(_ask_minutes, window))


def _ask_minutes(window: SessionWindow) -> None:
    timeline = window.session.timeline
    range_ns = timeline.range_ns
    if window.session.disk_history is None or range_ns is None:
        window.statusBar().showMessage("No history yet", _NOTICE_MS)
        return
    disk_history = window.session.disk_history
    if disk_history.failure and not disk_history.ring.num_bytes:
        window.banner.show_message(history_failure_text(disk_history.failure, has_some=False), HISTORY_NOT_STORED)
        return
    available_minutes, minutes_ago = (
        max((range_ns[1] - range_ns[0]) / 60e9, 0.1),
        max((range_ns[1] - timeline.cursor_ns) / 60e9, 0.0),
    )
    asked_at_s = time.monotonic()
    dialog = SaveHistoryDialog(
        window,
        minutes_question(available_minutes, minutes_ago),
        proposed_minutes(available_minutes, minutes_ago),
        available_minutes,
    )
    dialog.chosen.connect(
        lambda minutes: _ask_path(window, lambda path: save_since(window, asked_at_s - minutes * 60.0, path))
    )
    dialog.open()


def proposed_minutes(available: float, minutes_ago: float) -> float:
    """Return the proposed length in minutes, at most `available`, so that the saved history includes the shown time.

    The shown time is `minutes_ago` before the present.
    """
    return min(max(_DEFAULT_MINUTES, minutes_ago + _MARGIN_MINUTES), available)


def minutes_question(available: float, minutes_ago: float) -> str:
    """Return the text of the dialog that asks how many minutes to save. Arguments are in minutes."""
    question = f"Save the last … minutes ({available:.1f} available):"
    return (
        f"What is shown was {minutes_ago:.1f} minutes ago.\n{question}"
        if minutes_ago >= _MIN_MENTIONED_MINUTES
        else question
    )


def ask_recording(window: SessionWindow) -> None:
    """Ask for the path of a new recording. The first time, also ask whether to include texts."""
    ask_once(window, lambda: _ask_path(window, partial(record, window)))


def save_since(window: SessionWindow, since_s: float, path: str) -> Task | None:
    """Save everything since `since_s` on the monotonic clock, however long the user took to choose the path."""
    return save_last_seconds(window, time.monotonic() - since_s, path)


def save_last_seconds(window: SessionWindow, seconds: float, path: str) -> Task | None:
    """Save the last `seconds` to `path` on a thread. Returns None if there is no history."""
    disk_history = window.session.disk_history
    if disk_history is None:
        return None
    work = disk_history.save(_with_suffix(path), seconds)

    def show_result() -> None:
        if work.result is not None:
            window.banner.withdraw(_NOT_SAVED)
            add_recent(window.themes.settings, _with_suffix(path))
            note = f"; what is kept here is {work.result}" if work.result else ""
            window.statusBar().showMessage(f"Kept in {_with_suffix(path)}{note}", _NOTICE_MS)
        elif work.failure:
            window.banner.show_message(_NOT_SAVED, work.failure, is_temporary=True)

    return Task(window, work, f"Keeping {Path(path).name}", show_result)


def record(window: SessionWindow, path: str) -> None:
    disk_history = window.session.disk_history
    if disk_history is None or disk_history.recorder is not None:
        return
    try:
        disk_history.start_recording(_with_suffix(path))
        add_recent(window.themes.settings, _with_suffix(path))
    except BadInput as error:
        window.banner.show_message("Recording failed", str(error), is_temporary=True)
    window.session.status_changed.emit()


def stop_recording(window: SessionWindow) -> Task | None:
    """Stop the recording; a thread completes the file. Returns None if nothing is being recorded."""
    work = None if window.session.disk_history is None else window.session.disk_history.stop_recording()
    if work is None:
        return None
    window.session.status_changed.emit()

    def show_result() -> None:
        if work.result is not None:
            window.statusBar().showMessage(f"Recorded in {work.result}", _NOTICE_MS)
        elif work.failure:
            window.banner.show_message("Recording stopped early", work.failure)

    return Task(window, work, "Finishing the recording", show_result)


class Task(QObject):
    """Watches `work` for `window`.

    Shows a cancellable progress dialog if the work takes long, and calls `done` at its end.
    """

    def __init__(self, window: SessionWindow, work: Background[Any], text: str, on_done: Callable[[], None]) -> None:
        super().__init__(window)
        self.work, self._on_done = work, on_done
        self._dialog = QProgressDialog(text, "Cancel", 0, _STEPS, window)
        self._dialog.setWindowTitle("kvscope")
        self._dialog.setWindowModality(Qt.WindowModality.NonModal)
        self._dialog.setAutoClose(False)
        self._dialog.setAutoReset(False)
        self._dialog.setMinimumDuration(_DIALOG_DELAY_MS)
        self._dialog.canceled.connect(work.cancel)
        self._watch = BackgroundWatch(work, self._on_end, self, self._show_progress)
        window.closing.connect(self._cancel)

    def _show_progress(self, share: float) -> None:
        self._dialog.setValue(min(round(share * _STEPS), _STEPS - 1))

    def _on_end(self) -> None:
        self._on_done()
        self._dialog.deleteLater()
        self.deleteLater()

    def _cancel(self) -> None:
        self._watch.cancel()
        self.work.wait(2.0)


def write_file(
    window: SessionWindow, work: Background[Path], path: Path, progress_text: str, success_text: str, failure_title: str
) -> Task:
    """Show progress while `work` writes `path`, and then report success or failure in the window."""

    def show_result() -> None:
        if work.result:
            window.banner.withdraw(failure_title)
            window.statusBar().showMessage(f"{success_text} {path}", _WRITTEN_MS)
        elif work.failure:
            window.banner.show_message(failure_title, work.failure, is_temporary=True)

    return Task(window, work, f"{progress_text} {path.name}", show_result)


def _ask_path(window: SessionWindow, on_path: Callable[[str], object]) -> None:
    def on_chosen(path: str) -> None:
        window.themes.settings.change(recording_folder=str(Path(path).absolute().parent))
        on_path(path)

    ask_save(window, "Save recording", free_path(window), _FILES, on_chosen)


def _with_suffix(path: str) -> Path:
    return Path(path if path.endswith(".mcap") else f"{path}.mcap")


def _ask_history_length(window: SessionWindow) -> None:
    HistoryLengthDialog(window).open()
