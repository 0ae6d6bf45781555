"""Keeps request lanes up with a course that grows and forgets, a bounded number of events at a time. Knows no Qt."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

import numpy as np

from kvscope_app.views.timeline.request_lanes import RequestLanes
from kvscope_telemetry.summaries.course import Course
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.summary import SECOND_NS, TimedEvent

_REMEMBERED: Final = 1024
"""An event that comes late is put among so many of the newest."""


class CourseFollower:
    """Owns `lanes`; a new course begins them anew."""

    def __init__(self) -> None:
        self.lanes = RequestLanes()
        self._events: EventIndex | None = None
        self._num_seen = 0
        """Of all there ever were, forgotten ones included."""
        self._newest: deque[TimedEvent] = deque(maxlen=_REMEMBERED)

    def follow(self, course: Course, max_events: int = 600) -> bool:
        """Take in what came; whether there is more of it."""
        events = course.events
        if events is not self._events or events.num_forgotten + len(events) < self._num_seen:
            self._restart(events)
        fresh = self._fresh(events, max_events)
        if fresh is None:
            self._restart(events)
            fresh = self._fresh(events, max_events) or []
        self._add(course, fresh)
        if len(events):
            self.lanes.forget_before(int(events.time_ns[0]))
        return self._num_seen < events.num_forgotten + len(events)

    def _restart(self, events: EventIndex) -> None:
        version = self.lanes.version
        self.lanes = RequestLanes()
        self.lanes.version = version + 1
        self._events, self._num_seen = events, events.num_forgotten
        self._newest.clear()

    def _fresh(self, events: EventIndex, max_events: int) -> list[TimedEvent] | None:
        """Some not seen yet, in order; None where they came among ones so old that it is not known which they are."""
        total = events.num_forgotten + len(events)
        begin = max(self._num_seen - events.num_forgotten, 0)
        if total == self._num_seen:
            return []
        if not self._newest or begin == 0 or events[begin - 1] is self._newest[-1]:
            return [events[place] for place in range(begin, min(begin + max_events, len(events)))]
        seen = {id(timed) for timed in self._newest}
        tail = (events[place] for place in range(max(begin - len(seen), 0), len(events)))
        fresh = [timed for timed in tail if id(timed) not in seen]
        return fresh[:max_events] if len(fresh) == len(events) - begin else None

    def _add(self, course: Course, taken: list[TimedEvent]) -> None:
        self._num_seen = max(self._num_seen, course.events.num_forgotten) + len(taken)
        self._newest.extend(islice(taken, max(len(taken) - _REMEMBERED, 0), None))
        since_ns = self._known_since(course)
        begin = 0
        for place, timed in enumerate(taken):
            epoch = self.lanes.epoch if place == begin else taken[place - 1].epoch
            if epoch is not None and timed.epoch != epoch:
                self.lanes.add(taken[begin:place], since_ns)
                self.lanes.end_epoch(min(timed.time_ns, _end_of(course, epoch) or timed.time_ns))
                begin = place
        self.lanes.add(taken[begin:], since_ns)

    @staticmethod
    def _known_since(course: Course) -> int:
        begins = [int(times[0]) for times in (course.time_ns, course.events.time_ns) if times.size]
        return max(begins) if course.events.num_forgotten else min(begins, default=0)


def _end_of(course: Course, epoch: int) -> int | None:
    """When the newest second of an engine's start ended."""
    places = np.flatnonzero(course.epoch == epoch)
    return int(course.time_ns[places[-1]]) + SECOND_NS if places.size else None
