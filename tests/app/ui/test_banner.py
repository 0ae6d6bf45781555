"""What the strip tells goes when it is over: what passes by itself, what is mended by who mended it."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QWidget

from kvscope_app.ui.banner import Banner


@pytest.fixture
def banner(qtbot, monkeypatch):
    """Of a window that is in front."""
    host = QWidget()
    qtbot.addWidget(host)
    made = Banner(host)
    monkeypatch.setattr(QWidget, "isActiveWindow", lambda _: True)
    monkeypatch.setattr(QWidget, "underMouse", lambda _: False)
    host.show()
    yield made
    host.close()


def test_what_passes_goes_by_itself(banner):
    banner.show_message("The video could not be made", "no room", is_temporary=True)
    assert banner.hide_timer.isActive()
    banner.hide_timer.timeout.emit()
    assert banner.text == ""


def test_it_stays_while_nobody_can_have_read_it(banner, monkeypatch):
    monkeypatch.setattr(QWidget, "isActiveWindow", lambda _: False)
    banner.show_message("The video could not be made", "no room", is_temporary=True)
    banner.hide_timer.stop()
    banner.hide_timer.timeout.emit()
    assert banner.text == "The video could not be made"
    assert banner.hide_timer.isActive(), "it is tried again"


def test_what_lasts_is_not_taken_away_by_what_passed_before(banner):
    banner.show_message("The video could not be made", "no room", is_temporary=True)
    banner.show_message("The engine ended")
    assert not banner.hide_timer.isActive()


def test_only_what_is_over_is_withdrawn(banner):
    banner.show_message("The engine ended")
    banner.withdraw("The video could not be made")
    assert banner.text == "The engine ended"
    banner.withdraw("The engine ended")
    assert banner.text == ""
