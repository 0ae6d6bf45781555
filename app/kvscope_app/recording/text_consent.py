"""Asks once whether recordings may contain prompt and answer texts, which are private. The File menu can change the
answer.

`TextRecorder` requests the texts from the engine, only with the user's consent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMessageBox

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.session.recording.text_recorder import TextRecorder, set_text_consent, text_consent
from kvscope_app.session_window import SessionWindow

NAME: Final = "record_texts"
QUESTION: Final = "Include prompt and answer text in recordings?"
DETAIL: Final = (
    "With text, anyone who opens the file can read prompts and answers, block by block. Without it, the "
    "file has numbers only: which blocks are held, by which request, how full. This also applies to the "
    "recent history that kvscope keeps on disk. You can change it in the File menu."
)


def text_actions(window: SessionWindow, group: str) -> list[ActionSpec]:
    return [
        ActionSpec(
            NAME,
            "Include prompt text in recordings",
            group,
            partial(set_texts, window),
            checkable=True,
            checked=lambda: _records_texts(window),
        )
    ]


def apply_text_consent(window: SessionWindow) -> None:
    """Apply the user's saved decision on texts to the window. Call it after the window's actions were added."""
    if not window.session.timeline.is_file:
        set_texts(window, bool(text_consent(window.settings)), remember=False)


def set_texts(window: SessionWindow, on: bool, *, remember: bool = True) -> None:
    if remember:
        set_text_consent(window.settings, on)
    recorder = window.session.findChild(TextRecorder)
    if recorder is None and on:
        recorder = TextRecorder(window.session)
    if recorder is not None:
        recorder.set_on(on)
    window.actions_by_name.refresh()


def _records_texts(window: SessionWindow) -> bool:
    recorder = window.session.findChild(TextRecorder)
    return recorder is not None and recorder.is_on


def ask_once(window: SessionWindow, proceed: Callable[[], object]) -> None:
    """Ask whether to record texts, then call `proceed`.

    Does not ask if the user has answered already, or if the engine does not execute this client's commands. A question
    that was cancelled is asked again next time.
    """
    if text_consent(window.settings) is not None or not window.session.may_operate:
        proceed()
        return
    box = QMessageBox(QMessageBox.Icon.Question, "Recordings", QUESTION, parent=window)
    box.setInformativeText(DETAIL)
    box.setTextFormat(Qt.TextFormat.PlainText)
    without = box.addButton("Without text", QMessageBox.ButtonRole.NoRole)
    with_texts = box.addButton("With text", QMessageBox.ButtonRole.YesRole)
    box.addButton(QMessageBox.StandardButton.Cancel)
    box.setDefaultButton(without)
    box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)

    def on_answer() -> None:
        clicked = box.clickedButton()
        if clicked in (without, with_texts):
            set_texts(window, clicked is with_texts)
            proceed()

    box.finished.connect(on_answer)
    box.open()
