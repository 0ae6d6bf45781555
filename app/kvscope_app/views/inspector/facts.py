"""Facts that the inspector shows: names and values in groups, some with links. Imports no Qt."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from kvscope_telemetry.summaries.summary import TimedEvent


class Goal(Enum):
    """Target of a link, which determines the meaning of `Link.number`."""

    BLOCK = auto()
    """Row of the ledger."""
    REQUEST = auto()
    TIME = auto()
    """Time in nanoseconds since 1970."""
    FRAMES = auto()
    """Number of frames to move, negative for backwards."""
    EVENT = auto()
    """State after `Link.event`, or before it if the number is negative."""


@dataclass(frozen=True, slots=True)
class Link:
    goal: Goal
    number: int
    event: TimedEvent | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    value: str
    link: Link | None = None
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class FactsPage:
    title: str
    groups: tuple[Group, ...]


def page(title: str, *groups: tuple[str, Iterable[Fact]]) -> FactsPage:
    """Return a page without the empty groups."""
    made = (Group(name, tuple(facts)) for name, facts in groups)
    return FactsPage(title, tuple(group for group in made if group.facts))


def block_link(block: int) -> Link:
    return Link(Goal.BLOCK, block)


def request_link(number: int) -> Link:
    return Link(Goal.REQUEST, number)


def time_link(time_ns: int) -> Link:
    """Return a link to a time in ns since 1970."""
    return Link(Goal.TIME, time_ns)


def event_link(timed: TimedEvent, *, before: bool = False) -> Link:
    return Link(Goal.EVENT, -1 if before else 1, timed)


def as_json(facts: Iterable[Fact]) -> str:
    """Return one JSON object; names that occur several times have a list of values."""
    document: dict[str, str | list[str]] = {}
    for fact in facts:
        before = document.get(fact.name)
        if before is None:
            document[fact.name] = fact.value
        else:
            document[fact.name] = [*([before] if isinstance(before, str) else before), fact.value]
    return json.dumps(document, ensure_ascii=False, indent=2)


def as_text(facts: Iterable[Fact]) -> str:
    return "\n".join(f"{fact.name}\t{' '.join(fact.value.split())}" for fact in facts)
