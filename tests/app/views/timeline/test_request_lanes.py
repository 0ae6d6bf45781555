"""Tests of the phases of requests as spans, compared with a plain model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.conftest import examples

sys.path.insert(0, str(Path(__file__).parents[1]))

from timed_fakes import EPOCH, START_NS, second, small_overview, timed

from kvscope_app.views.timeline.overview_follower import OverviewFollower
from kvscope_app.views.timeline.request_lanes import OPEN_NS, PhaseChange, RequestLanes
from kvscope_telemetry.request_phase import RequestPhase
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.request_phases import packed_phases
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, TimedEvent

KINDS = ("admitted", "preempted", "resumed", "finished", "aborted", "refused", "evicted", "note")


def spans_of(lanes):
    """Return (epoch, number, phase, begin, end) of each span, in creation order."""
    requests, spans = lanes.requests, lanes.spans
    return [
        (
            int(requests["epoch"][request]),
            int(requests["number"][request]),
            RequestPhase(int(phase)),
            int(begin),
            int(end),
        )
        for begin, end, phase, request in zip(
            *(spans[name] for name in ("begin", "end", "phase", "request")), strict=True
        )
    ]


class PlainSpans:
    """Plain model: a list of spans in which the last span of a request is open until its next phase or its end."""

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
            self.begin(number, RequestPhase.QUEUED, at - data.waited_ns)
        elif kind in ("preempted", "finished") and is_new:
            self.begin(number, RequestPhase.RUNNING, START_NS)
        elif kind == "resumed" and is_new:
            self.begin(number, RequestPhase.PREEMPTED, START_NS)
        if kind != "finished":
            at = self.close(number, at)
            phase = {
                "admitted": RequestPhase.RUNNING,
                "resumed": RequestPhase.RUNNING,
                "preempted": RequestPhase.SWAPPED if data and data.is_swapped else RequestPhase.PREEMPTED,
                "aborted": RequestPhase.ABORTED,
                "refused": RequestPhase.REFUSED,
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
def event_histories(draw):
    """Generate events of a few requests and engine runs, in time order."""
    at, epoch, events = 100.0, EPOCH, []
    for _ in range(draw(st.integers(0, 60))):
        at += draw(st.sampled_from((0.0, 0.25, 3.0)))
        epoch += draw(st.sampled_from((0,) * 15 + (1,)))
        data = {"about": "started"} if draw(st.booleans()) else {}
        if data:
            data |= {"waited_ns": draw(st.integers(0, 5 * SECOND_NS)), "is_swapped": draw(st.booleans())}
        events.append(timed(at, draw(st.sampled_from(KINDS)), draw(st.integers(0, 5)), epoch=epoch, **data))
    return events


@settings(max_examples=examples(150), deadline=None)
@given(event_histories())
def test_request_phase_spans_of_the_timeline_equal_those_of_a_plain_model(events):
    lanes, plain = RequestLanes(), PlainSpans()
    for event in events:
        lanes.add_events((event,), START_NS)
        plain.add(event)
    assert spans_of(lanes) == [tuple(span) for span in plain.spans]


@settings(max_examples=examples(100), deadline=None)
@given(event_histories())
def test_requests_of_one_row_do_not_overlap(events):
    lanes = RequestLanes()
    lanes.add_events(events, START_NS)
    requests = lanes.requests
    for row in np.unique(requests["row"]):
        places = np.flatnonzero(requests["row"] == row)
        order = places[np.argsort(requests["begin"][places], kind="stable")]
        assert (requests["end"][order[:-1]] < requests["begin"][order[1:]]).all()


@settings(max_examples=examples(60), deadline=None)
@given(event_histories(), st.lists(st.integers(1, 9), max_size=30), st.integers(1, 7))
def test_request_phase_spans_do_not_depend_on_how_events_are_batched(events, sizes, at_once):
    overview, follower = SessionOverview(), OverviewFollower()
    overview.extend((), (timed(0, "note", 0),))
    left = list(events)
    for size in [*sizes, len(left)]:
        overview.extend((), left[:size])
        left = left[size:]
        while follower.update(overview, at_once):
            pass
    whole = OverviewFollower()
    while whole.update(overview):
        pass
    assert spans_of(follower.lanes) == spans_of(whole.lanes)


def test_events_that_arrive_late_end_timeline_requests_at_their_own_time():
    overview, follower = SessionOverview(), OverviewFollower()
    overview.extend((), [timed(1, "admitted", 1), timed(5, "admitted", 2)])
    follower.update(overview)
    overview.extend((), [timed(4, "finished", 1), timed(6, "finished", 2)])
    follower.update(overview)
    assert [(number, end) for _, number, _, _, end in spans_of(follower.lanes)] == [
        (1, START_NS + 4 * SECOND_NS),
        (2, START_NS + 6 * SECOND_NS),
    ]


def test_oldest_finished_requests_leave_the_timeline_and_running_ones_stay():
    overview, follower = SessionOverview(), OverviewFollower()
    overview.events = EventIndex(max_events=1_000)
    overview.extend((), (timed(0, "admitted", 7),))
    for number in range(8, 3_008):
        overview.extend((), (timed(number, "admitted", number), timed(number + 0.5, "finished", number)))
        while number % 100 == 0 and follower.update(overview):
            pass
    while follower.update(overview):
        pass
    numbers = {number for _, number, *_ in spans_of(follower.lanes)}
    assert 7 in numbers
    assert 3_007 in numbers
    assert len(numbers) < 2_000
    overview.extend((), (timed(4_000, "finished", 7),))
    follower.update(overview)
    assert (EPOCH, 7, RequestPhase.RUNNING, START_NS, START_NS + 4_000 * SECOND_NS) in spans_of(follower.lanes)
    assert follower.lanes.index_of(EPOCH, 7) is not None


def test_requests_of_an_ended_engine_end_when_it_was_last_seen():
    overview, follower = small_overview(), OverviewFollower()
    overview.extend((), (timed(300, "admitted", 1, epoch=EPOCH + 1),))
    follower.update(overview)
    assert (EPOCH, 2, RequestPhase.RUNNING, START_NS + 12 * SECOND_NS, START_NS + 100 * SECOND_NS) in spans_of(
        follower.lanes
    )


def phase_change(at_s, number, kind, epoch=EPOCH):
    return PhaseChange(START_NS + round(at_s * SECOND_NS), epoch, number, kind)


def phases_by_request(lanes):
    """Return (phase, begin, end) in seconds for each request, in time order."""
    phases = {}
    for _, number, phase, begin, end in sorted(spans_of(lanes), key=lambda span: span[3:]):
        ended = None if end == OPEN_NS else (end - START_NS) / SECOND_NS
        phases.setdefault(number, []).append((phase, (begin - START_NS) / SECOND_NS, ended))
    return phases


def admission(at_s, number, num_known_tokens=100, num_cached_tokens=0, kind="admitted"):
    event = timed(at_s, kind, number, about="started", num_known_tokens=num_known_tokens)
    return TimedEvent(event.time_ns, event.epoch, replace(event.event, num_tokens=num_cached_tokens))


def test_decode_change_ends_the_prefill_even_if_it_arrives_late():
    lanes = RequestLanes()
    lanes.has_phases = True
    lanes.add_events(
        [admission(1, 5), timed(3, "preempted", 5), admission(4, 5, kind="resumed"), timed(9, "finished", 5)]
    )
    lanes.add_events(
        [
            phase_change(5, 5, RequestPhase.DECODE),
            phase_change(2, 5, RequestPhase.DECODE),
            phase_change(2, 5, RequestPhase.DECODE),
        ]
    )
    assert phases_by_request(lanes) == {
        5: [
            (RequestPhase.PREFILL, 1.0, 2.0),
            (RequestPhase.DECODE, 2.0, 3.0),
            (RequestPhase.PREEMPTED, 3.0, 4.0),
            (RequestPhase.PREFILL, 4.0, 5.0),
            (RequestPhase.DECODE, 5.0, 9.0),
        ]
    }


def test_request_admitted_with_all_its_blocks_decodes_immediately():
    lanes = RequestLanes()
    lanes.has_phases = True
    lanes.add_events(
        [admission(1, 5, num_known_tokens=100, num_cached_tokens=99), phase_change(1.5, 5, RequestPhase.DECODE)]
    )
    assert phases_by_request(lanes) == {5: [(RequestPhase.DECODE, 1.0, None)]}


def test_waiting_request_has_a_lane_even_if_it_never_runs():
    lanes = RequestLanes()
    lanes.has_phases = True
    lanes.add_events(
        [
            phase_change(1, 5, RequestPhase.QUEUED),
            phase_change(1, 6, RequestPhase.QUEUED),
            phase_change(0, 7, RequestPhase.DECODE),
        ]
    )
    assert phases_by_request(lanes) == {
        5: [(RequestPhase.QUEUED, 1, None)],
        6: [(RequestPhase.QUEUED, 1, None)],
        7: [(RequestPhase.DECODE, 0, None)],
    }
    lanes.add_events([admission(4, 5), phase_change(1, 5, RequestPhase.QUEUED), timed(6, "aborted", 6)])
    found = phases_by_request(lanes)
    assert found[5] == [(RequestPhase.QUEUED, 1, 4), (RequestPhase.PREFILL, 4, None)]
    assert found[6] == [(RequestPhase.QUEUED, 1, 6), (RequestPhase.ABORTED, 6, 6)]
    lanes.add_events(
        [
            timed(8, "admitted", 1, epoch=EPOCH + 1),
            phase_change(7, 9, RequestPhase.QUEUED),
            phase_change(5, 5, RequestPhase.DECODE),
        ]
    )
    assert phases_by_request(lanes)[5] == [
        (RequestPhase.QUEUED, 1, 4),
        (RequestPhase.PREFILL, 4, 5),
        (RequestPhase.DECODE, 5, 8),
    ]
    assert 9 not in phases_by_request(lanes), "changes of an ended engine are ignored"


def test_request_without_phase_changes_is_running():
    lanes = RequestLanes()
    lanes.add_events([admission(1, 5)])
    assert phases_by_request(lanes) == {5: [(RequestPhase.RUNNING, 1, None)]}


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_spans_do_not_depend_on_when_phase_changes_arrive(data):
    """Ten consecutive requests; phase changes arrive after their second, while old requests are dropped."""
    events, phases, expected = [], [], {}
    for number in range(1, 11):
        at = 10.0 * number
        first, second = sorted(data.draw(st.lists(st.integers(1, 8), min_size=2, max_size=2)))
        events += [admission(at, number), timed(at + 9, "finished", number)]
        phases.append((at + first, number, RequestPhase.DECODE))
        if second > first:  # it was preempted and resumed
            events[-1:-1] = [timed(at + second, "preempted", number), admission(at + second, number, kind="resumed")]
        spans = [(RequestPhase.PREFILL, at, at + first), (RequestPhase.DECODE, at + first, at + second)]
        again = [(RequestPhase.PREEMPTED, at + second, at + second), (RequestPhase.PREFILL, at + second, at + 9)]
        expected[number] = [*spans, *again] if second > first else [spans[0], (RequestPhase.DECODE, at + first, at + 9)]
    late = data.draw(st.permutations(phases))
    lanes = RequestLanes()
    lanes.has_phases = True
    cut = data.draw(st.integers(0, len(late)))
    lanes.add_events(events)
    lanes.add_events([phase_change(*each) for each in late[:cut]])
    lanes.add_events([phase_change(*each) for each in late[cut:]])
    assert phases_by_request(lanes) == expected


def test_timeline_reads_request_phase_changes_from_overview_summaries():
    overview, follower = SessionOverview(), OverviewFollower()
    packed = packed_phases([(START_NS + 2 * SECOND_NS, 5, RequestPhase.DECODE), (START_NS, 6, RequestPhase.QUEUED)])
    overview.extend([second(1, phases=b"")], [admission(1, 5)])
    follower.update(overview)
    assert phases_by_request(follower.lanes) == {5: [(RequestPhase.PREFILL, 1, None)]}
    overview.extend([second(2, phases=packed)])
    follower.update(overview)
    follower.update(overview)
    assert phases_by_request(follower.lanes) == {
        5: [(RequestPhase.PREFILL, 1, 2), (RequestPhase.DECODE, 2, None)],
        6: [(RequestPhase.QUEUED, 0, None)],
    }
