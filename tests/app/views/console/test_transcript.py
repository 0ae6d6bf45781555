"""Tests of scrolling in the transcript: the button to the end, and keys."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QApplication


@pytest.fixture
def long_answer(console, qtbot):
    """Transcript with an unfinished answer that is longer than the window, scrolled to its end."""
    console.ask("Count")
    console.token("a line\n\n" * 60)
    transcript = console.page.transcript
    qtbot.waitUntil(lambda: transcript.verticalScrollBar().maximum() > transcript.height())
    qtbot.waitUntil(lambda: is_at_end(transcript))
    return transcript


def is_at_end(transcript):
    return transcript.verticalScrollBar().value() == transcript.verticalScrollBar().maximum()


def test_button_to_the_end_is_visible_only_while_scrolled_up(long_answer, qtbot):
    assert not long_answer.to_end.isVisible()
    long_answer.verticalScrollBar().setValue(0)
    assert long_answer.to_end.isVisible()
    qtbot.mouseClick(long_answer.to_end, Qt.MouseButton.LeftButton)
    assert is_at_end(long_answer)
    assert not long_answer.to_end.isVisible()


def test_scrolled_up_transcript_keeps_its_position_and_reports_new_text(console, long_answer, qtbot):
    bar = long_answer.verticalScrollBar()
    bar.setValue(100)
    maximum = bar.maximum()
    console.token("a line\n\n" * 20)
    qtbot.waitUntil(lambda: bar.maximum() > maximum)
    assert bar.value() == 100
    assert "New text" in long_answer.to_end.text()
    long_answer.to_end.click()
    console.token("a line\n\n" * 20)
    qtbot.waitUntil(lambda: is_at_end(long_answer))
    assert "New text" not in long_answer.to_end.text()


@pytest.mark.parametrize("is_text_focused", [False, True])
def test_end_and_home_scroll_if_the_transcript_or_its_text_has_the_focus(console, long_answer, qtbot, is_text_focused):
    for key in (Qt.Key.Key_Home, Qt.Key.Key_End):  # the window has actions with these keys
        QShortcut(QKeySequence(key), console.view).activated.connect(pytest.fail)
    focused = console.card.body if is_text_focused else long_answer
    focused.setFocus()
    qtbot.keyClick(focused, Qt.Key.Key_Home)
    assert long_answer.verticalScrollBar().value() == 0
    qtbot.keyClick(focused, Qt.Key.Key_End)
    assert is_at_end(long_answer)


def test_focus_stays_in_the_transcript_when_the_pressed_button_is_hidden(long_answer, qtbot):
    long_answer.verticalScrollBar().setValue(0)
    long_answer.to_end.setFocus()
    qtbot.keyClick(long_answer.to_end, Qt.Key.Key_Space)
    assert is_at_end(long_answer)
    assert QApplication.focusWidget() is long_answer
