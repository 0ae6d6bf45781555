"""Log of changed requests since the last telemetry frame: the scheduler writes it, the step recorder drains it.

Owns only the record of changes; the state itself is the scheduler's. The code that drives a scheduler must drain the
log after each step, otherwise it grows (events are bounded: the oldest are dropped first).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvscope_engine.policy.kv_cache.move_log import NO_MOVES, MoveLog
from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.telemetry import Event, Moves

MAX_EVENTS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class RequestChanges:
    """Changes since the last `drain`. A request that ran without such a change is not included, because the
    step's plan contains it.
    """

    added: tuple[Request, ...] = ()
    touched: tuple[Request, ...] = ()
    """Requests whose state or block table changed, in order of the first change, including `added`."""
    tables: dict[int, int] = field(default_factory=dict)
    """Number of unchanged leading entries of all block tables of a request, by request number."""
    groups: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of unchanged leading entries of a single block table, by (request number, KV group)."""
    events: tuple[Event, ...] = ()
    moves: Moves = NO_MOVES

    def __bool__(self) -> bool:
        return bool(self.touched or self.events)


class ChangeLog:
    """Collects changes. Each call but `drain` and `drain_events` is O(1)."""

    __slots__ = ("_added", "_events", "_groups", "_moves", "_tables", "_touched")

    def __init__(self, moves: MoveLog) -> None:
        self._moves = moves
        self._added: list[Request] = []
        self._touched: dict[int, Request] = {}
        self._tables: dict[int, int] = {}
        self._groups: dict[tuple[int, int], int] = {}
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def add_request(self, request: Request) -> None:
        self._added.append(request)
        self._touched[request.number] = request

    def touch(self, request: Request) -> None:
        self._touched[request.number] = request

    def record_table(self, request: Request, unchanged: int, group: int | None = None) -> None:
        """Record that a block table of the request changed after its first `unchanged` entries.

        It is the table of KV group `group`; None means the tables of all groups.
        """
        number = request.number
        self._touched[number] = request
        if group is None:
            self._tables[number] = min(unchanged, self._tables.get(number, unchanged))
        else:
            self._groups[number, group] = min(unchanged, self._groups.get((number, group), unchanged))

    def record_event(self, event: Event) -> None:
        self._events.append(event)

    def record_notice(self, text: str, now_ns: int) -> None:
        """Record an event of kind `note`, which explains a deviation from what the user asked for."""
        self.record_event(Event(kind="note", time_ns=now_ns, cause=text))

    def drain_events(self) -> tuple[Event, ...]:
        """Return and clear only the events, for callers that do not need other changes."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def drain(self) -> RequestChanges:
        touched, moves = tuple(self._touched.values()), self._moves.drain()
        changes = RequestChanges(tuple(self._added), touched, self._tables, self._groups, self.drain_events(), moves)
        self._added.clear()
        self._touched.clear()
        self._tables, self._groups = {}, {}
        return changes
