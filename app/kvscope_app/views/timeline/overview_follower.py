"""Incrementally updates request lanes from an overview that grows and drops old data, a bounded number of events per
call. Imports no Qt."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

import numpy as np

from kvscope_app.views.timeline.request_lanes import PhaseChange, RequestLanes
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.request_phases import numbers_of
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, TimedEvent

LaneEvent = TimedEvent | PhaseChange
_NUM_REMEMBERED: Final = 1024
"""Number of newest events that are remembered to recognize events that arrive late, out of order."""


class OverviewFollower:
    """Adds new events and phase changes of a session's overview to `lanes`.

    When `update` receives another overview, the lanes are built again from the beginning.
    """

    def __init__(self) -> None:
        self.lanes = RequestLanes()
        self._events: EventIndex | None = None
        self._num_seen = 0
        """Number of events consumed, including ones dropped since."""
        self._num_phases = 0
        """Number of phase changes consumed, including ones dropped since."""
        self._newest: deque[TimedEvent] = deque(maxlen=_NUM_REMEMBERED)

    def update(self, overview: SessionOverview, max_events: int = 600) -> bool:
        """Consume at most `max_events` new events. Returns whether more are pending."""
        events = overview.events
        if events is not self._events or events.num_forgotten + len(events) < self._num_seen:
            self._restart(events)
        fresh = self._fresh(events, max_events)
        if fresh is None:
            self._restart(events)
            fresh = self._fresh(events, max_events) or []
        self.lanes.has_phases = overview.phases.is_available
        self._add_to_lanes(overview, self._merge_phases(overview, fresh))
        if len(events):
            self.lanes.drop_before(int(events.time_ns[0]))
        return self._num_seen < events.num_forgotten + len(events)

    def _restart(self, events: EventIndex) -> None:
        version = self.lanes.version
        self.lanes = RequestLanes()
        self.lanes.version = version + 1
        self._events, self._num_seen = events, events.num_forgotten
        self._num_phases = 0
        self._newest.clear()

    def _fresh(self, events: EventIndex, max_events: int) -> list[TimedEvent] | None:
        """Return unseen events in order; None if events were inserted so far back that the unseen ones cannot be
        identified."""
        total = events.num_forgotten + len(events)
        begin = max(self._num_seen - events.num_forgotten, 0)
        if total == self._num_seen:
            return []
        if not self._newest or begin == 0 or events[begin - 1] is self._newest[-1]:
            return [events[index] for index in range(begin, min(begin + max_events, len(events)))]
        seen = {id(timed) for timed in self._newest}
        tail = (events[index] for index in range(max(begin - len(seen), 0), len(events)))
        fresh = [timed for timed in tail if id(timed) not in seen]
        return fresh[:max_events] if len(fresh) == len(events) - begin else None

    def _merge_phases(self, overview: SessionOverview, fresh: list[TimedEvent]) -> list[LaneEvent]:
        """Return events merged in time order with the phase changes up to the last of them, or with all if no event is
        pending."""
        self._num_seen = max(self._num_seen, overview.events.num_forgotten) + len(fresh)
        self._newest.extend(islice(fresh, max(len(fresh) - _NUM_REMEMBERED, 0), None))
        has_more = self._num_seen < overview.events.num_forgotten + len(overview.events)
        phases = overview.phases
        rows = phases.rows[max(self._num_phases - phases.num_forgotten, 0) :]
        if has_more and fresh:
            late = np.flatnonzero(rows["time_ns"] > fresh[-1].time_ns)
            rows = rows[: int(late[0])] if late.size else rows
        self._num_phases = max(self._num_phases, phases.num_forgotten) + rows.size
        turns = [PhaseChange(*phase) for phase in numbers_of(rows)]
        return sorted([*fresh, *turns], key=lambda thing: thing.time_ns) if turns else [*fresh]

    def _add_to_lanes(self, overview: SessionOverview, taken: list[LaneEvent]) -> None:
        since_ns = self._known_since(overview)
        begin = 0
        epoch = self.lanes.epoch
        for index, thing in enumerate(taken):
            if isinstance(thing, PhaseChange):  # a late phase change belongs to an engine that has ended
                continue
            if epoch is not None and thing.epoch != epoch:
                self.lanes.add_events(taken[begin:index], since_ns)
                self.lanes.end_epoch(min(thing.time_ns, _end_of(overview, epoch) or thing.time_ns))
                begin = index
            epoch = thing.epoch
        self.lanes.add_events(taken[begin:], since_ns)

    @staticmethod
    def _known_since(overview: SessionOverview) -> int:
        begins = [int(times[0]) for times in (overview.time_ns, overview.events.time_ns) if times.size]
        return max(begins) if overview.events.num_forgotten else min(begins, default=0)


def _end_of(overview: SessionOverview, epoch: int) -> int | None:
    indices = np.flatnonzero(overview.epoch == epoch)
    return int(overview.time_ns[indices[-1]]) + SECOND_NS if indices.size else None
