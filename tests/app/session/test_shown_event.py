"""Tests of going to an event: the state before and after it, its request, and several events in one frame."""

from __future__ import annotations

from functools import cache

import pytest
from PySide6.QtCore import Qt
from tests.app.session.test_timeline import SECOND_NS, live, shared
from tests.app.session.test_timeline import wait_for_seek as wait_for_live_seek

from kvscope_app.session.session import Session
from kvscope_app.views.events.events_view import EventsView
from kvscope_app.views.inspector.inspector_view import REQUEST, STEP, InspectorView
from kvscope_app.views.throughput.throughput_view import ThroughputView
from kvscope_app.views.timeline.lane_descriptions import LaneHit, hit_lane
from kvscope_app.views.timeline.timeline_view import TimelineView
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording

__all__ = ["live", "shared"]


@pytest.fixture
def session(qapp, qtbot):
    """Session on the bundled sample, paused at its start, with its overview read."""
    made = Session(PlaybackSource(Recording.open(sample_recording()), is_playing=False))
    made.start()
    qtbot.waitUntil(lambda: made.is_overview_complete and made.mirror.hello is not None)
    yield made
    made.close()
    made.deleteLater()


def wait_for_seek(session, qtbot):
    """Wait until the state at the cursor is applied."""
    qtbot.waitUntil(lambda: not session.source.is_seeking)
    session.poll()


def state_of(session, number):
    row = session.mirror.requests.row_of(number)
    return None if row is None else RequestState(int(session.mirror.requests.state[row]))


def blocks_of(session, number):
    """Return the number of GPU blocks of a request, without swapped blocks."""
    return int((session.mirror.requests.table(number) < session.mirror.hello.cache.num_blocks).sum())


@cache
def events_of_sample():
    """Return the events of each frame of the sample by `seq`, read directly from the file."""
    return {frame.seq: frame.events for frame in Recording.open(sample_recording()).frames()}


def events_in_frame(session, kind, seq):
    """Return the events of `kind` in frame `seq`."""
    return [event for event in events_of_sample().get(seq, ()) if event.kind == kind]


def facts_of(view):
    model = view.table.facts
    return [fact for row in range(model.rowCount()) if (fact := model.fact_at(row)) is not None]


def test_shown_event_selects_its_request_and_shows_the_state_after_or_before_it(session, qtbot):
    seen = []
    while (timed := session.timeline.go_to_event(["preempted"], forward=True)) is not None and len(seen) < 8:
        wait_for_seek(session, qtbot)
        seen.append(timed.event)
        assert timed.event in events_in_frame(session, "preempted", session.mirror.seq)
        assert session.selection.request == timed.event.number
        assert state_of(session, timed.event.number) is not RequestState.RUNNING
        assert blocks_of(session, timed.event.number) == 0
        session.timeline.switch_event_side()
        wait_for_seek(session, qtbot)
        assert session.timeline.is_before_event
        num_just_given = timed.event.num_blocks - blocks_of(session, timed.event.number)
        assert num_just_given in (0, 1)  # it may get one more block in the step that then preempts it
        assert state_of(session, timed.event.number) is RequestState.RUNNING
        session.timeline.switch_event_side()
        wait_for_seek(session, qtbot)
        assert state_of(session, timed.event.number) is not RequestState.RUNNING
    assert len(seen) == 8


def test_every_event_is_visited_even_if_several_are_in_one_frame(session, qtbot):
    every = [session.overview.events[place] for place in range(len(session.overview.events))]
    session.timeline.show_event(every[0])
    forward = [every[0]]
    while (timed := session.timeline.go_to_event(None, forward=True)) is not None:
        forward.append(timed)
        if len(forward) % 16 == 0:
            wait_for_seek(session, qtbot)  # seeking in between makes no difference
    assert forward == every
    back = [every[-1]]
    while (timed := session.timeline.go_to_event(None, forward=False)) is not None:
        back.append(timed)
    assert back[::-1] == every


def test_shown_event_is_cleared_by_other_navigation(session, qtbot):
    received = []
    session.timeline.event_shown.connect(lambda: received.append(session.timeline.shown_event))
    for leave in (
        lambda: session.timeline.go_to(session.timeline.range_ns[0]),
        lambda: session.timeline.step_frames(1),
        session.timeline.play,
        session.timeline.go_live,
    ):
        timed = session.overview.events[5]
        session.timeline.show_event(timed)
        assert session.timeline.shown_event is timed
        assert not session.timeline.is_playing
        leave()
        assert session.timeline.shown_event is None
        assert session.timeline.switch_event_side() is None
    assert received[-2:] == [session.overview.events[5], None]


def test_event_is_shown_by_a_click_in_events_table_timeline_or_chart(session, qtbot):
    preempted = session.overview.events.find(kinds=("preempted",))
    timed = session.overview.events[int(preempted[3])]
    events, timeline, charts = EventsView(session), TimelineView(session), ThroughputView(session)
    for view in (events, timeline, charts):
        qtbot.addWidget(view)
        view.resize(1200, 700)
        view.show()
        view.refresh()

    def is_shown():
        wait_for_seek(session, qtbot)
        assert session.timeline.shown_event.event == timed.event
        assert session.selection.request == timed.event.number
        assert blocks_of(session, timed.event.number) == 0
        session.timeline.go_to(session.timeline.range_ns[0])
        session.selection.select_request(None)

    row = next(row for row in range(events.model.rowCount()) if events.model.timed_at(row) == timed)
    index = events.model.index(row, 0)
    events.table.scrollTo(index)
    qtbot.mouseClick(events.table.viewport(), Qt.MouseButton.LeftButton, pos=events.table.visualRect(index).center())
    is_shown()

    qtbot.waitUntil(lambda: timeline.refresh() or timeline.canvas.shown is not None)
    found = hit_lane("preempted", timeline.canvas.shown, timed.time_ns, 1)
    assert isinstance(found, LaneHit)
    timeline.canvas.chosen.emit(found)
    is_shown()

    charts.charts.panels["requests"].mark_chosen.emit(timed)
    is_shown()


def test_inspector_describes_the_shown_event_and_links_to_its_requests(session, qtbot):
    view = InspectorView(session)
    qtbot.addWidget(view)
    view.resize(420, 900)
    view.show()
    preempted = session.overview.events.find(kinds=("preempted",))
    for place in preempted[[0, 5, 2]].tolist():
        timed = session.overview.events[place]
        session.timeline.show_event(timed)
        wait_for_seek(session, qtbot)
        view.refresh()
        assert view.subject == REQUEST
        because = [fact.value for fact in facts_of(view) if fact.name == "Reason"]
        assert because[0].casefold().startswith(cause_text(timed.event).casefold())
        other = next(fact for fact in facts_of(view) if fact.name == "Needed by")
        view.table.followed.emit(other.link)
        assert session.selection.request == timed.event.other
        view.refresh()
        whom = next(fact for fact in facts_of(view) if fact.name == "Happened to")
        view.table.followed.emit(whom.link)
        assert session.selection.request == timed.event.number
        view.refresh()
        shown = next(fact for fact in facts_of(view) if fact.name == "Shown")
        view.table.followed.emit(shown.link)
        assert session.timeline.is_before_event


def test_inspector_links_to_the_blocks_of_an_eviction(session, qtbot):
    view = InspectorView(session)
    qtbot.addWidget(view)
    view.resize(420, 900)
    view.show()
    timed = session.overview.events[int(session.overview.events.find(kinds=("evicted",))[0])]
    session.timeline.show_event(timed)
    wait_for_seek(session, qtbot)
    view.refresh()
    assert view.subject == STEP

    def evicted():
        view.refresh()
        return [fact for fact in facts_of(view) if fact.name == "Evicted" and fact.link is not None]

    qtbot.waitUntil(lambda: len(evicted()) == min(timed.event.num_blocks, 12))
    link = evicted()[0].link
    view.table.followed.emit(link)
    assert session.selection.block == link.number


def test_live_session_shows_the_recorded_state_after_an_event(live, qtbot):
    begin_ns = live.timeline.range_ns[0] + SECOND_NS // 2  # there is no state before the first recorded frame
    qtbot.waitUntil(lambda: live.overview.events.find(begin_ns).size > 0)
    timed = live.overview.events[int(live.overview.events.find(begin_ns)[0])]
    live.timeline.show_event(timed)
    assert live.timeline.is_paused
    wait_for_live_seek(live, qtbot)
    assert live.selection.request == timed.event.number
    events = [entry.event for entry in live.history.events.since(0)]
    assert timed.event in events
    seq = live.mirror.seq
    live.timeline.switch_event_side()
    qtbot.waitUntil(lambda: live.mirror.seq == seq - 1)
    live.timeline.go_live()
    assert live.timeline.shown_event is None
