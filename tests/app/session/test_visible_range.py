"""The visible range that linked views share: changes, and how they are undone."""

from __future__ import annotations

import pytest

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.session.visible_range import VisibleRange

FIRST, SECOND, THIRD = TimeSpan(0, 10), TimeSpan(2, 6), TimeSpan(3, 4)


class Clock:
    """Seconds that a test moves on."""

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


def test_each_change_is_announced_once_and_the_same_range_is_no_change(visible_range, qtbot):
    with qtbot.waitSignal(visible_range.changed):
        visible_range.show(FIRST)
    with qtbot.assertNotEmitted(visible_range.changed):
        visible_range.show(FIRST)
    assert visible_range.span == FIRST


def test_back_and_forward_go_through_the_zooms(visible_range, clock):
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


def test_turns_of_a_wheel_are_undone_together(visible_range, clock):
    visible_range.show(FIRST)
    clock.now_s += 5
    for span in (SECOND, THIRD):
        clock.now_s += 0.1
        visible_range.show(span)
    visible_range.back()
    assert visible_range.span == FIRST


def test_a_zoom_after_an_undo_drops_what_was_undone(visible_range, clock):
    visible_range.show(FIRST)
    clock.now_s += 5
    visible_range.show(SECOND)
    visible_range.back()
    visible_range.show(THIRD)
    assert not visible_range.can_go_forward
    visible_range.back()
    assert visible_range.span == FIRST
