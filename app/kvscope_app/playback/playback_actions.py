"""Actions of a timeline, live or recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kvscope_app.actions.action_registry import ActionSpec
from kvscope_app.playback.playback import LONG_JUMP_S, SHORT_JUMP_S, change_speed, to_start, toggle
from kvscope_app.session.timeline import Timeline
from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.number_text import count
from kvscope_telemetry.messages.event_kinds import EVENT_KINDS, cause_text, kind_text
from kvscope_telemetry.summaries.summary import TimedEvent

TIME: Final = "Time"
STEPPED_EVENT_KINDS: Final = {kind.name: kind.plural for kind in EVENT_KINDS if kind.is_stepped} | {"": "all events"}
"""Event kinds that the shortcuts for events can step through, with their plural text. The empty kind means all events.
"""


class EventJumps:
    """Moves to the next or previous event of the chosen kind.

    `report` is called with a description of that event, or with a message that there is none.
    """

    def __init__(self, timeline: Timeline, report: Callable[[str], None]) -> None:
        self.kind = "preempted"
        self._timeline = timeline
        self._report = report

    def set_kind(self, kind: str) -> None:
        self.kind = kind

    def go_to_event(self, *, forward: bool) -> None:
        event = self._timeline.go_to_event([self.kind] if self.kind else None, forward=forward)
        if event is None:
            self._report(f"No {STEPPED_EVENT_KINDS[self.kind]} {'after' if forward else 'before'} this moment")
        else:
            self._report(_describe(event))

    def switch_side(self) -> None:
        event = self._timeline.switch_event_side()
        if event is None:
            self._report("No event is selected: go to one first")
        else:
            self._report(f"{'Before' if self._timeline.is_before_event else 'After'}: {_describe(event)}")


def playback_actions(timeline: Timeline, jumps: EventJumps) -> list[ActionSpec]:
    wide_text, narrow_text = f"{LONG_JUMP_S:.0f} s", f"{SHORT_JUMP_S:.0f} s"
    end = "Go to end" if timeline.is_file else "Go live"
    jump_by, shared_zoom = timeline.jump_by, timeline.shared_zoom

    def history_action(
        name: str, text: str, run: Callable[[], object], keys: tuple[str, ...], icon: str = "", **options: Any
    ) -> ActionSpec:
        return ActionSpec(name, text, TIME, run, keys, icon, enabled=lambda: timeline.range_ns is not None, **options)

    return [
        ActionSpec(
            "play",
            "Play" if timeline.is_file else "Pause",
            TIME,
            partial(toggle, timeline),
            ("Space",),
            "play" if timeline.is_file else "pause",
            yields_to_widget=True,
            tip="Pause here, or play from here",
        ),
        history_action(
            "to_start", "Go to start", partial(to_start, timeline), ("Home",), "to-start", yields_to_widget=True
        ),
        ActionSpec(
            "to_end",
            end,
            TIME,
            timeline.go_live,
            ("End",),
            "to-end" if timeline.is_file else "live",
            yields_to_widget=True,
            enabled=None if timeline.is_file else lambda: timeline.is_paused or shared_zoom.span is not None,
        ),
        ActionSpec(
            "zoom_back",
            "Undo zoom",
            TIME,
            shared_zoom.back,
            ("Alt+Left",),
            enabled=lambda: shared_zoom.can_go_back,
            tip="Undo the last zoom of the time axis",
        ),
        ActionSpec(
            "zoom_forward",
            "Redo zoom",
            TIME,
            shared_zoom.forward,
            ("Alt+Right",),
            enabled=lambda: shared_zoom.can_go_forward,
            tip="Redo the zoom that you undid",
        ),
        history_action(
            "back", f"Back {wide_text}", partial(jump_by, -LONG_JUMP_S), ("Ctrl+Left",), starts_section=True
        ),
        history_action("forward", f"Forward {wide_text}", partial(jump_by, LONG_JUMP_S), ("Ctrl+Right",)),
        history_action("back_little", f"Back {narrow_text}", partial(jump_by, -SHORT_JUMP_S), ("Ctrl+Shift+Left",)),
        history_action(
            "forward_little", f"Forward {narrow_text}", partial(jump_by, SHORT_JUMP_S), ("Ctrl+Shift+Right",)
        ),
        history_action("frame_back", "Previous frame", partial(timeline.step_frames, -1), (",",), "frame-back"),
        history_action("frame_forward", "Next frame", partial(timeline.step_frames, 1), (".",), "frame-forward"),
        history_action(
            "event_before",
            "Previous event",
            partial(jumps.go_to_event, forward=False),
            ("Ctrl+,",),
            starts_section=True,
        ),
        history_action("event_next", "Next event", partial(jumps.go_to_event, forward=True), ("Ctrl+.",)),
        history_action(
            "event_side",
            "State before this event",
            jumps.switch_side,
            ("B",),
            tip="The state before the current event; again: the state after it",
        ),
        history_action("slower", "Slower", partial(change_speed, timeline, -1), ("[",), starts_section=True),
        history_action("faster", "Faster", partial(change_speed, timeline, 1), ("]",)),
    ]


def event_kind_actions(jumps: EventJumps, group: str) -> list[ActionSpec]:
    return [
        ActionSpec(
            f"events_{kind or 'all'}",
            f"Step by {plural}",
            group,
            partial(jumps.set_kind, kind),
            checkable=True,
            exclusive="event_kind",
            checked=partial(lambda kind: jumps.kind == kind, kind),
        )
        for kind, plural in STEPPED_EVENT_KINDS.items()
    ]


def _describe(timed: TimedEvent) -> str:
    """Return a description such as `preempted #12 at 14:03:27.125: no block was free for request 14`."""
    event, cause = timed.event, cause_text(timed.event)
    subject = f" #{count(event.number)}" if event.number else ""
    return f"{kind_text(event.kind)}{subject} at {clock_text(timed.time_ns)}" + (f": {cause}" if cause else "")
