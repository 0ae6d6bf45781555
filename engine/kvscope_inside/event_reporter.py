"""Publishes events of a host engine, with causes in the wording of `kvscope_telemetry.messages.event_kinds`."""

from __future__ import annotations

from typing import Any

from kvscope_inside.block_updates import StepChanges
from kvscope_telemetry.messages.event_kinds import emptied_text, with_cause
from kvscope_telemetry.messages.telemetry import Event, EventData
from kvscope_telemetry.producer.cache_state import CacheState


class EventReporter:
    """Adds events to `state`, which are published with the next frame."""

    def __init__(self, state: CacheState, step: StepChanges) -> None:
        self._state, self._step = state, step

    def report(self, kind: str, *, time_ns: int = 0, **fields: Any) -> None:
        """Add an event. `fields` are fields of `Event`; `time_ns` is the time of the step if not given.

        Pass the cause either as `data`, from which its text is derived, or as a text in `cause`.
        """
        self._state.add_event(with_cause(Event(kind=kind, time_ns=time_ns or self._step.time_ns, **fields)))

    def report_pause(self, by: str) -> None:
        self.report("engine_paused", data=EventData(kind="engine_paused", by=by))

    def report_resume(self, by: str, lasted_ns: int, why: str) -> None:
        """Report that the engine resumed after user `by` had paused it for `lasted_ns`. `why` says who or what
        resumed it.
        """
        self.report("engine_resumed", data=EventData(kind="engine_resumed", by=by, lasted_ns=lasted_ns, why=why))

    def report_emptied(self, num_blocks: int, *, num_states: int = 0, where: str = "the prefix cache") -> None:
        self.report("note", num_blocks=num_blocks, cause=emptied_text(where, num_blocks, num_states))
