"""Tests of the banner: temporary messages disappear by themselves, others when they are withdrawn."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QWidget

from kvscope_app.ui.banner import Banner


@pytest.fixture
def banner(qtbot, monkeypatch):
    """Banner of an active window."""
    host = QWidget()
    qtbot.addWidget(host)
    made = Banner(host)
    monkeypatch.setattr(QWidget, "isActiveWindow", lambda _: True)
    monkeypatch.setattr(QWidget, "underMouse", lambda _: False)
    host.show()
    yield made
    host.close()


def test_temporary_message_disappears_after_its_time(banner):
    banner.show_message("The video could not be made", "no room", is_temporary=True)
    assert banner.hide_timer.isActive()
    banner.hide_timer.timeout.emit()
    assert banner.text == ""


def test_temporary_message_stays_while_the_window_is_inactive(banner, monkeypatch):
    monkeypatch.setattr(QWidget, "isActiveWindow", lambda _: False)
    banner.show_message("The video could not be made", "no room", is_temporary=True)
    banner.hide_timer.stop()
    banner.hide_timer.timeout.emit()
    assert banner.text == "The video could not be made"
    assert banner.hide_timer.isActive(), "the timer is restarted"


def test_timer_of_a_temporary_message_does_not_remove_a_later_lasting_one(banner):
    banner.show_message("The video could not be made", "no room", is_temporary=True)
    banner.show_message("The engine ended")
    assert not banner.hide_timer.isActive()


def test_withdraw_removes_only_the_given_message(banner):
    banner.show_message("The engine ended")
    banner.withdraw("The video could not be made")
    assert banner.text == "The engine ended"
    banner.withdraw("The engine ended")
    assert banner.text == ""
