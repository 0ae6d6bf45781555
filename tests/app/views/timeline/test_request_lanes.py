"""Requests' lives as spans: the same as a plain model makes of the same events, however they come."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from timed_fakes import EPOCH, START_NS, small_course, timed

from kvscope_app.views.timeline.course_follower import CourseFollower
from kvscope_app.views.timeline.request_lanes import OPEN_NS, Phase, RequestLanes
from kvscope_telemetry.summaries.course import Course
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.summary import SECOND_NS

KINDS = ("admitted", "preempted", "resumed", "finished", "aborted", "refused", "evicted", "note")


def spans_of(lanes):
    """(epoch, number, phase, begin, end) of each, in the order they began to be known."""
    lives, spans = lanes.lives, lanes.spans
    return [
        (int(lives["epoch"][life]), int(lives["number"][life]), Phase(int(phase)), int(begin), int(end))
        for begin, end, phase, life in zip(*(spans[name] for name in ("begin", "end", "phase", "life")), strict=True)
    ]


class PlainLives:
    """The same said plainly: a list of spans, the last of a request open until another or its end."""

    def __init__(self):
        self.spans, self.open, self.epoch = [], {}, None

    def add(self, event):
        if event.epoch != self.epoch:
            for number in list(self.open):
                self.close(number, event.time_ns)
                del self.open[number]
            self.epoch = event.epoch
        kind, number, at = event.event.kind, event.event.number, event.time_ns
        data = event.event.data
        if not number or kind in ("evicted", "note"):
            return
        is_new = number not in self.open
        if kind == "admitted" and is_new and data and data.waited_ns:
            self.begin(number, Phase.QUEUED, at - data.waited_ns)
        elif kind in ("preempted", "finished") and is_new:
            self.begin(number, Phase.RUNNING, START_NS)
        elif kind == "resumed" and is_new:
            self.begin(number, Phase.PREEMPTED, START_NS)
        if kind != "finished":
            at = self.close(number, at)
            phase = {
                "admitted": Phase.RUNNING,
                "resumed": Phase.RUNNING,
                "preempted": Phase.SWAPPED if data and data.is_swapped else Phase.PREEMPTED,
                "aborted": Phase.ABORTED,
                "refused": Phase.REFUSED,
            }[kind]
            self.begin(number, phase, at)
        if kind in ("finished", "aborted", "refused"):
            self.close(number, at)
            del self.open[number]

    def begin(self, number, phase, at):
        self.spans.append([self.epoch, number, phase, at, OPEN_NS])
        self.open[number] = self.spans[-1]

    def close(self, number, at):
        if number not in self.open:
            return at
        at = max(at, self.open[number][3])
        self.open[number][4] = at
        return at


@st.composite
def histories(draw):
    """Events in the order of time, of a few requests and two engine starts."""
    at, epoch, events = 100.0, EPOCH, []
    for _ in range(draw(st.integers(0, 60))):
        at += draw(st.sampled_from((0.0, 0.25, 3.0)))
        epoch += draw(st.sampled_from((0,) * 15 + (1,)))
        data = {"about": "started"} if draw(st.booleans()) else {}
        if data:
            data |= {"waited_ns": draw(st.integers(0, 5 * SECOND_NS)), "is_swapped": draw(st.booleans())}
        events.append(timed(at, draw(st.sampled_from(KINDS)), draw(st.integers(0, 5)), epoch=epoch, **data))
    return events


@settings(max_examples=150, deadline=None)
@given(histories())
def test_spans_are_those_of_a_plain_model(events):
    lanes, plain = RequestLanes(), PlainLives()
    for event in events:
        lanes.add((event,), START_NS)
        plain.add(event)
    assert spans_of(lanes) == [tuple(span) for span in plain.spans]


@settings(max_examples=100, deadline=None)
@given(histories())
def test_in_a_row_one_request_ends_before_the_next_begins(events):
    lanes = RequestLanes()
    lanes.add(events, START_NS)
    lives = lanes.lives
    for row in np.unique(lives["row"]):
        places = np.flatnonzero(lives["row"] == row)
        order = places[np.argsort(lives["begin"][places], kind="stable")]
        assert (lives["end"][order[:-1]] < lives["begin"][order[1:]]).all()


@settings(max_examples=60, deadline=None)
@given(histories(), st.lists(st.integers(1, 9), max_size=30), st.integers(1, 7))
def test_coming_bit_by_bit_they_are_the_same(events, sizes, at_once):
    course, follower = Course(), CourseFollower()
    course.extend((), (timed(0, "note", 0),))
    left = list(events)
    for size in [*sizes, len(left)]:
        course.extend((), left[:size])
        left = left[size:]
        while follower.follow(course, at_once):
            pass
    whole = CourseFollower()
    while whole.follow(course):
        pass
    assert spans_of(follower.lanes) == spans_of(whole.lanes)


def test_what_comes_late_is_taken_once():
    course, follower = Course(), CourseFollower()
    course.extend((), [timed(1, "admitted", 1), timed(5, "admitted", 2)])
    follower.follow(course)
    course.extend((), [timed(4, "finished", 1), timed(6, "finished", 2)])
    follower.follow(course)
    assert [(number, end) for _, number, _, _, end in spans_of(follower.lanes)] == [
        (1, START_NS + 4 * SECOND_NS),
        (2, START_NS + 6 * SECOND_NS),
    ]


def test_what_is_forgotten_goes_and_what_runs_stays():
    course, follower = Course(), CourseFollower()
    course.events = EventIndex(max_events=1_000)
    course.extend((), (timed(0, "admitted", 7),))
    for number in range(8, 3_008):
        course.extend((), (timed(number, "admitted", number), timed(number + 0.5, "finished", number)))
        while number % 100 == 0 and follower.follow(course):
            pass
    while follower.follow(course):
        pass
    numbers = {number for _, number, *_ in spans_of(follower.lanes)}
    assert 7 in numbers
    assert 3_007 in numbers
    assert len(numbers) < 2_000
    course.extend((), (timed(4_000, "finished", 7),))
    follower.follow(course)
    assert (EPOCH, 7, Phase.RUNNING, START_NS, START_NS + 4_000 * SECOND_NS) in spans_of(follower.lanes)
    assert follower.lanes.life_of(EPOCH, 7) is not None


def test_an_engine_that_ended_ends_its_requests_when_it_was_last_seen():
    course, follower = small_course(), CourseFollower()
    course.extend((), (timed(300, "admitted", 1, epoch=EPOCH + 1),))
    follower.follow(course)
    assert (EPOCH, 2, Phase.RUNNING, START_NS + 12 * SECOND_NS, START_NS + 100 * SECOND_NS) in spans_of(follower.lanes)
