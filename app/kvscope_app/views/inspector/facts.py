"""Facts that the inspector shows: (name, value) pairs in groups, some with links. Imports no Qt."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from kvscope_telemetry.summaries.summary import TimedEvent


class LinkTarget(Enum):
    """Kind of a link's target, which determines the meaning of `Link.number`."""

    BLOCK = auto()
    """`Link.number` is a block's row in the ledger."""
    REQUEST = auto()
    TIME = auto()
    """`Link.number` is a time in ns since 1970."""
    FRAMES = auto()
    """`Link.number` is a number of frames to move the cursor by, negative for backwards."""
    CHAT_TURN = auto()
    """`Link.number` is the number of the request that computed the turn's answer."""
    EVENT = auto()
    """`Link.event` is the event. A negative `Link.number` selects the state before the event, otherwise the state after
    it.
    """
    WHAT_IF = auto()
    """The view that simulates past requests with other settings. `Link.number` is 0."""


@dataclass(frozen=True, slots=True)
class Link:
    target: LinkTarget
    number: int
    event: TimedEvent | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    value: str
    link: Link | None = None
    tip: str = ""


@dataclass(frozen=True, slots=True)
class FactGroup:
    title: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class FactsPage:
    title: str
    groups: tuple[FactGroup, ...]


def page(title: str, *groups: tuple[str, Iterable[Fact]]) -> FactsPage:
    """Return a page with the non-empty `groups`, each a (title, facts) pair."""
    all_groups = (FactGroup(name, tuple(facts)) for name, facts in groups)
    return FactsPage(title, tuple(group for group in all_groups if group.facts))


def block_link(block: int) -> Link:
    return Link(LinkTarget.BLOCK, block)


def request_link(number: int) -> Link:
    return Link(LinkTarget.REQUEST, number)


def turn_link(number: int) -> Link:
    return Link(LinkTarget.CHAT_TURN, number)


def time_link(time_ns: int) -> Link:
    return Link(LinkTarget.TIME, time_ns)


def event_link(timed: TimedEvent, *, before: bool = False) -> Link:
    return Link(LinkTarget.EVENT, -1 if before else 1, timed)


def as_json(facts: Iterable[Fact]) -> str:
    """Return the facts as one JSON object. A name that occurs several times has a list of values."""
    document: dict[str, str | list[str]] = {}
    for fact in facts:
        previous = document.get(fact.name)
        if previous is None:
            document[fact.name] = fact.value
        else:
            document[fact.name] = [*([previous] if isinstance(previous, str) else previous), fact.value]
    return json.dumps(document, ensure_ascii=False, indent=2)


def as_text(facts: Iterable[Fact]) -> str:
    """Return one line per fact: name, tab and value."""
    return "\n".join(f"{fact.name}\t{' '.join(fact.value.split())}" for fact in facts)
