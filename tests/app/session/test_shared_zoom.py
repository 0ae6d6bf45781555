"""Tests of the zoom that linked views share: changes, back and forward."""

from __future__ import annotations

import pytest

from kvscope_app.session.shared_zoom import SharedZoom
from kvscope_app.session.time_span import TimeSpan

FIRST, SECOND, THIRD = TimeSpan(0, 10), TimeSpan(2, 6), TimeSpan(3, 4)


class Clock:
    """Clock in seconds that the test moves."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def shared_zoom(qapp, clock):
    made = SharedZoom(clock=clock)
    yield made
    made.deleteLater()


def test_shared_zoom_emits_changed_only_if_the_shown_range_differs(shared_zoom, qtbot):
    with qtbot.waitSignal(shared_zoom.changed):
        shared_zoom.show(FIRST)
    with qtbot.assertNotEmitted(shared_zoom.changed):
        shared_zoom.show(FIRST)
    assert shared_zoom.span == FIRST


def test_back_and_forward_step_through_the_shown_ranges(shared_zoom, clock):
    for span in (FIRST, SECOND, None):
        clock.now_s += 5
        shared_zoom.show(span)
    assert shared_zoom.back()
    assert shared_zoom.span == SECOND
    assert shared_zoom.back()
    assert shared_zoom.back()
    assert shared_zoom.span is None
    assert not shared_zoom.back()
    assert not shared_zoom.can_go_back
    assert shared_zoom.forward()
    assert shared_zoom.span == FIRST
    assert shared_zoom.can_go_forward


def test_zooms_in_quick_succession_are_undone_together(shared_zoom, clock):
    shared_zoom.show(FIRST)
    clock.now_s += 5
    for span in (SECOND, THIRD):
        clock.now_s += 0.1
        shared_zoom.show(span)
    shared_zoom.back()
    assert shared_zoom.span == FIRST


def test_new_zoom_after_going_back_clears_forward(shared_zoom, clock):
    shared_zoom.show(FIRST)
    clock.now_s += 5
    shared_zoom.show(SECOND)
    shared_zoom.back()
    shared_zoom.show(THIRD)
    assert not shared_zoom.can_go_forward
    shared_zoom.back()
    assert shared_zoom.span == FIRST
