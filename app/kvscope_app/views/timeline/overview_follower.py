"""Updates request lanes from an overview that grows and drops old data, with a limited number of events per call.
Imports no Qt.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

import numpy as np

from kvscope_app.views.timeline.request_lanes import PhaseChange, RequestLanes
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.request_phases import decoded_phase_rows
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, TimedEvent

LaneEvent = TimedEvent | PhaseChange
_NUM_RECENT_EVENTS: Final = 1024
"""Number of newest consumed events that are remembered, to recognize events that were inserted late, out of order."""


class OverviewFollower:
    """Adds new events and phase changes of an overview to `lanes`. If `update` gets another overview, the lanes are
    rebuilt.
    """

    def __init__(self) -> None:
        self.lanes = RequestLanes()
        self._events: EventIndex | None = None
        self._num_consumed = 0
        """Number of events consumed, including those that the overview has dropped since."""
        self._num_phases_consumed = 0
        self._recent: deque[TimedEvent] = deque(maxlen=_NUM_RECENT_EVENTS)

    def update(self, overview: SessionOverview, max_events: int = 600) -> bool:
        """Consume at most `max_events` new events. Returns whether more are pending."""
        events = overview.events
        if events is not self._events or events.num_forgotten + len(events) < self._num_consumed:
            self._restart(events)
        unseen = self._unseen_events(events, max_events)
        if unseen is None:
            self._restart(events)
            unseen = self._unseen_events(events, max_events) or []
        self.lanes.has_phases = overview.phases.is_available
        self._add_to_lanes(overview, self._merge_phases(overview, unseen))
        if len(events):
            self.lanes.drop_before(int(events.time_ns[0]))
        return self._num_consumed < events.num_forgotten + len(events)

    def _restart(self, events: EventIndex) -> None:
        version = self.lanes.version
        self.lanes = RequestLanes()
        self.lanes.version = version + 1
        self._events, self._num_consumed = events, events.num_forgotten
        self._num_phases_consumed = 0
        self._recent.clear()

    def _unseen_events(self, events: EventIndex, max_events: int) -> list[TimedEvent] | None:
        """Return at most `max_events` unseen events in order; None if an event was inserted too far back to identify
        the unseen ones.
        """
        total = events.num_forgotten + len(events)
        begin = max(self._num_consumed - events.num_forgotten, 0)
        if total == self._num_consumed:
            return []
        if not self._recent or begin == 0 or events[begin - 1] is self._recent[-1]:
            return [events[index] for index in range(begin, min(begin + max_events, len(events)))]
        recent_ids = {id(timed) for timed in self._recent}
        tail = (events[index] for index in range(max(begin - len(recent_ids), 0), len(events)))
        unseen = [timed for timed in tail if id(timed) not in recent_ids]
        return unseen[:max_events] if len(unseen) == len(events) - begin else None

    def _merge_phases(self, overview: SessionOverview, unseen: list[TimedEvent]) -> list[LaneEvent]:
        """Merge `unseen` with the phase changes in order of time. If more events are pending, later phase changes wait
        for them.
        """
        self._num_consumed = max(self._num_consumed, overview.events.num_forgotten) + len(unseen)
        self._recent.extend(islice(unseen, max(len(unseen) - _NUM_RECENT_EVENTS, 0), None))
        has_more = self._num_consumed < overview.events.num_forgotten + len(overview.events)
        phases = overview.phases
        rows = phases.rows[max(self._num_phases_consumed - phases.num_forgotten, 0) :]
        if has_more and unseen:
            later = np.flatnonzero(rows["time_ns"] > unseen[-1].time_ns)
            rows = rows[: int(later[0])] if later.size else rows
        self._num_phases_consumed = max(self._num_phases_consumed, phases.num_forgotten) + rows.size
        changes = [PhaseChange(*phase) for phase in decoded_phase_rows(rows)]
        return sorted([*unseen, *changes], key=lambda item: item.time_ns) if changes else [*unseen]

    def _add_to_lanes(self, overview: SessionOverview, items: list[LaneEvent]) -> None:
        since_ns = self._known_since(overview)
        begin = 0
        epoch = self.lanes.epoch
        for index, item in enumerate(items):
            if isinstance(item, PhaseChange):  # a late phase change belongs to an engine that has ended
                continue
            if epoch is not None and item.epoch != epoch:
                self.lanes.add_events(items[begin:index], since_ns)
                self.lanes.end_epoch(min(item.time_ns, _end_of(overview, epoch) or item.time_ns))
                begin = index
            epoch = item.epoch
        self.lanes.add_events(items[begin:], since_ns)

    @staticmethod
    def _known_since(overview: SessionOverview) -> int:
        begins = [int(times[0]) for times in (overview.time_ns, overview.events.time_ns) if times.size]
        return max(begins) if overview.events.num_forgotten else min(begins, default=0)


def _end_of(overview: SessionOverview, epoch: int) -> int | None:
    indices = np.flatnonzero(overview.epoch == epoch)
    return int(overview.time_ns[indices[-1]]) + SECOND_NS if indices.size else None
