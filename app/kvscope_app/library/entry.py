"""A recording as the library lists it. Knows no file and no database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

UNTOLD: Final = -1
"""In place of a number."""


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is in a recording, as far as a list tells it. New fields come with defaults."""

    model: str = ""
    device: str = ""
    start_ns: int = 0
    """By the wall clock: nanoseconds since 1970."""
    length_s: float = 0.0
    num_bytes: int = 0
    peak_usage: float | None = None
    """Share of the pool that requests held when it was the most."""
    preemptions: int = 0
    """`UNTOLD` where the engine does not say; so are requests."""
    requests: int = 0
    has_texts: bool = False
    is_complete: bool = True
    epoch: int = 0
    """Of the first engine start in it."""

    @property
    def is_known(self) -> bool:
        """Whether anything was found out yet."""
        return self.start_ns > 0

    def is_same_recording(self, other: Facts) -> bool:
        """Whether both are of one recording, wherever the file lies."""
        return self.is_known and (self.epoch, self.start_ns, self.model) == (other.epoch, other.start_ns, other.model)


NO_FACTS: Final = Facts()


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the list."""

    path: str
    seen_s: float
    """When kvscope last wrote or opened it, by the wall clock: seconds since 1970."""
    facts: Facts = NO_FACTS
    stamp: str = ""
    """Size and time of the file when `facts` were found out; empty: never."""
    problem: str = ""
    """Why it cannot be read, in a line."""
    notes: str = ""
    tags: str = ""
    """Words, with a space between them."""
    picture: bytes = b""
    """A PNG: time across, address down."""
    is_missing: bool = False
    """Nothing is at `path` now."""
    is_part: bool = False
    """What is there is called `path.part`: it is being written, or was cut short."""

    @property
    def name(self) -> str:
        """The file's, without the folder."""
        return self.path.rpartition("/")[2]

    @property
    def open_path(self) -> str:
        """The path to open."""
        return f"{self.path}.part" if self.is_part else self.path

    @property
    def words(self) -> str:
        """All text that a search looks in."""
        return " ".join((self.path, self.facts.model, self.facts.device, self.notes, self.tags)).casefold()
