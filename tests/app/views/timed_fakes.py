"""Fakes of a session with a timeline, and functions that make overviews for them."""

from __future__ import annotations

from types import SimpleNamespace

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.recording.bookmarks import Bookmarks
from kvscope_app.session.session_selection import SessionSelection
from kvscope_app.session.shared_zoom import SharedZoom
from kvscope_app.session.timeline import Loop
from kvscope_telemetry.messages.telemetry import Event, EventData
from kvscope_telemetry.mirror.request_mirror import RequestMirror
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary, TimedEvent

START_NS = 1_700_000_000 * SECOND_NS
EPOCH = 4_812_049_538_478_226_247


class FakeTimeline(QObject):
    """Timeline whose cursor jumps immediately."""

    def __init__(self):
        super().__init__()
        self.cursor_ns = START_NS
        self.range_ns = None
        self.is_file = False
        self.is_live = True
        self.loop = Loop(self, self)
        self.shared_zoom = SharedZoom(self)
        self.went_to = []

    def go_to(self, time_ns):
        self.cursor_ns = time_ns
        self.went_to.append(time_ns)


class FakeTimedSession(QObject):
    """Session with an overview and without recorded history."""

    overview_changed = Signal()

    def __init__(self, overview=None):
        super().__init__()
        self.overview = SessionOverview() if overview is None else overview
        self.timeline = FakeTimeline()
        self.timeline.show_event = self._show_event
        self.bookmarks = Bookmarks(self)
        self.mirror = self.live_mirror = SimpleNamespace(epoch=EPOCH, seq=0, requests=RequestMirror(10))
        self.selection = SessionSelection(self)

    def new_recording_handle(self):
        return None

    def _show_event(self, timed, *, before=False):
        self.timeline.go_to(timed.time_ns)
        if timed.event.number:
            self.selection.select_request(timed.event.number)


def timed(second, kind, number=1, other=0, epoch=EPOCH, about="", **data):
    """Return an event `second` seconds after the start."""
    time_ns = START_NS + round(second * SECOND_NS)
    made = EventData(kind=about, **data) if about else None
    cause = f"{kind} because of {other}" if other else ""
    return TimedEvent(time_ns, epoch, Event(kind=kind, time_ns=1, number=number, other=other, cause=cause, data=made))


def second(at, epoch=EPOCH, **more):
    """Return a summary of one second."""
    return Summary(time_ns=START_NS + at * SECOND_NS, epoch=epoch, **more)


def small_overview():
    """Return an overview of 100 s.

    The pool is half used, and full from second 50 on; seconds 60 to 69 are missing; one request was swapped out and one
    refused.
    """
    overview = SessionOverview()
    seconds = [
        second(
            at,
            active_blocks=100 if at >= 50 else 50,
            cached_blocks=0 if at >= 50 else 25,
            free_blocks=0 if at >= 50 else 25,
            num_running=2,
            num_waiting=at % 2,
            copied_blocks=3 if at == 20 else 0,
            num_lost_frames=5 if at == 80 else 0,
        )
        for at in range(100)
        if not 60 <= at < 70
    ]
    overview.extend(
        seconds,
        [
            timed(10, "admitted", 1, about="started", waited_ns=5 * SECOND_NS),
            timed(12, "admitted", 2, about="started"),
            timed(30, "preempted", 1, 2, about="preempted", is_swapped=True, choice="newest"),
            timed(40, "resumed", 1, about="started", waited_ns=10 * SECOND_NS),
            timed(45, "evicted", 0, 2),
            timed(70, "refused", 3),
            timed(90, "finished", 1),
        ],
    )
    return overview
