"""Test that a loop is enforced while its bounds are being changed."""

from __future__ import annotations

from PySide6.QtCore import QObject, QTimer

from kvscope_app.session.timeline import Loop

SECOND_NS = 1_000_000_000


class PlayingTimeline:
    """Timeline that is playing beyond the loop's end."""

    is_live, is_playing, is_at_end = False, True, False
    cursor_ns = 100 * SECOND_NS

    def __init__(self):
        self.went_to = []

    def go_to(self, time_ns):
        self.went_to.append(time_ns)

    def play(self):
        pass


def test_playback_jumps_to_the_loop_start_while_the_loop_end_is_being_dragged(qapp, qtbot):
    played, parent = PlayingTimeline(), QObject()
    loop = Loop(played, parent)
    loop.set_begin(SECOND_NS)
    dragging = QTimer(parent, interval=1)
    dragging.timeout.connect(lambda: loop.set_end(10 * SECOND_NS))
    dragging.start()
    qtbot.waitUntil(lambda: bool(played.went_to), timeout=60_000)
    dragging.stop()
    loop.clear()
    assert set(played.went_to) == {SECOND_NS}
