"""Facts about the event that the user selected: its cause, and links to its requests and blocks. Imports no Qt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.number_text import count, plural
from kvscope_app.views.block_locations import locate_block
from kvscope_app.views.events.event_entries import why_text
from kvscope_app.views.inspector.facts import Fact, Link, LinkTarget, block_link, event_link, request_link
from kvscope_telemetry.messages.telemetry import CacheInfo, Event, Frame
from kvscope_telemetry.summaries.summary import TimedEvent

THIS_EVENT: Final = "This event"
_MAX_BLOCKS: Final = 12


def event_facts(timed: TimedEvent, cache: CacheInfo, frame: Frame | None, *, is_before: bool) -> Iterator[Fact]:
    """Yield the facts about `timed`.

    Args:
        frame: The frame that reported the event; None if it was not read.
        is_before: Whether the view shows the state before the event.
    """
    event = timed.event
    yield Fact(event.kind.capitalize(), clock_text(timed.time_ns))
    shown, other = ("before", "after") if is_before else ("after", "before")
    yield Fact("Shown", f"the state {shown} it; go to the one {other}", event_link(timed, before=not is_before))
    if event.number:
        yield Fact("Happened to", f"request #{count(event.number)}", request_link(event.number))
    if event.other:
        yield Fact(_role_of_other(event), f"request #{count(event.other)}", request_link(event.other))
    if reason := why_text(event):
        yield Fact("Reason", f"{reason[0].upper()}{reason[1:]}")
    if event.kind == "preempted" and event.num_blocks and not is_before:
        value = f"{plural(event.num_blocks, 'block')}, highlighted in the state before this event"
        yield Fact("Lost", value, event_link(timed, before=True))
    if event.kind == "preempted":
        yield Fact("What if", "there had been more blocks?", Link(LinkTarget.WHAT_IF, 0))
    if event.kind == "evicted" and frame is not None:
        yield from _evicted(frame, cache)


def _role_of_other(event: Event) -> str:
    kind = "" if event.data is None else event.data.kind
    return {"preempted": "Needed by", "evicted": "Needed by", "forked": "Forked from"}.get(kind, "Caused by")


def _evicted(frame: Frame, cache: CacheInfo) -> Iterator[Fact]:
    blocks = np.frombuffer(frame.moves.evicted, "<u4").tolist()
    for block in blocks[:_MAX_BLOCKS]:
        yield Fact("Evicted", locate_block(cache, block).name, block_link(block))
    if len(blocks) > _MAX_BLOCKS:
        yield Fact("And", f"{count(len(blocks) - _MAX_BLOCKS)} more")
