"""What the inspector tells: names and values in groups, some of which lead somewhere. Knows no Qt."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from kvscope_telemetry.summaries.summary import TimedEvent


class Goal(Enum):
    """What a link leads to, and what its number is."""

    BLOCK = auto()
    """A row of the ledger."""
    REQUEST = auto()
    TIME = auto()
    """Nanoseconds since 1970."""
    FRAMES = auto()
    """So many frames further, or back."""
    EVENT = auto()
    """The state after `Link.event`, or before it where the number is negative."""


@dataclass(frozen=True, slots=True)
class Link:
    """Where a value leads."""

    goal: Goal
    number: int
    event: TimedEvent | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and its value, with its unit."""

    name: str
    value: str
    link: Link | None = None
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Facts under a heading."""

    title: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class FactsPage:
    """All facts about one block, request or step, in groups."""

    title: str
    groups: tuple[Group, ...]


def page(title: str, *groups: tuple[str, Iterable[Fact]]) -> FactsPage:
    """Without the groups that are empty."""
    made = (Group(name, tuple(facts)) for name, facts in groups)
    return FactsPage(title, tuple(group for group in made if group.facts))


def block_link(block: int) -> Link:
    """To a block."""
    return Link(Goal.BLOCK, block)


def request_link(number: int) -> Link:
    """To a request."""
    return Link(Goal.REQUEST, number)


def time_link(time_ns: int) -> Link:
    """To a moment."""
    return Link(Goal.TIME, time_ns)


def event_link(timed: TimedEvent, *, before: bool = False) -> Link:
    """To the state after an event, or before it."""
    return Link(Goal.EVENT, -1 if before else 1, timed)


def as_json(facts: Iterable[Fact]) -> str:
    """One object; of names that are there several times, a list."""
    document: dict[str, str | list[str]] = {}
    for fact in facts:
        before = document.get(fact.name)
        if before is None:
            document[fact.name] = fact.value
        else:
            document[fact.name] = [*([before] if isinstance(before, str) else before), fact.value]
    return json.dumps(document, ensure_ascii=False, indent=2)


def as_text(facts: Iterable[Fact]) -> str:
    """Tab separated, a line each."""
    return "\n".join(f"{fact.name}\t{' '.join(fact.value.split())}" for fact in facts)
