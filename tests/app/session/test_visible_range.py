"""Tests of the visible range that linked views share: changes, back and forward."""

from __future__ import annotations

import pytest

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.session.visible_range import VisibleRange

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
def visible_range(qapp, clock):
    made = VisibleRange(clock=clock)
    yield made
    made.deleteLater()


def test_changed_is_emitted_once_per_change_and_not_for_the_same_range(visible_range, qtbot):
    with qtbot.waitSignal(visible_range.changed):
        visible_range.show(FIRST)
    with qtbot.assertNotEmitted(visible_range.changed):
        visible_range.show(FIRST)
    assert visible_range.span == FIRST


def test_back_and_forward_step_through_the_shown_ranges(visible_range, clock):
    for span in (FIRST, SECOND, None):
        clock.now_s += 5
        visible_range.show(span)
    assert visible_range.back()
    assert visible_range.span == SECOND
    assert visible_range.back()
    assert visible_range.back()
    assert visible_range.span is None
    assert not visible_range.back()
    assert not visible_range.can_go_back
    assert visible_range.forward()
    assert visible_range.span == FIRST
    assert visible_range.can_go_forward


def test_zooms_in_quick_succession_are_undone_together(visible_range, clock):
    visible_range.show(FIRST)
    clock.now_s += 5
    for span in (SECOND, THIRD):
        clock.now_s += 0.1
        visible_range.show(span)
    visible_range.back()
    assert visible_range.span == FIRST


def test_new_zoom_after_going_back_clears_forward(visible_range, clock):
    visible_range.show(FIRST)
    clock.now_s += 5
    visible_range.show(SECOND)
    visible_range.back()
    visible_range.show(THIRD)
    assert not visible_range.can_go_forward
    visible_range.back()
    assert visible_range.span == FIRST
