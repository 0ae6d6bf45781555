"""What a source can do besides giving updates: sending commands, playing, telling contents. The only code that asks a
source for its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from kvscope_telemetry.messages.commands import BlockContent, Command, Reply
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.source import Source


@runtime_checkable
class LiveLink(Protocol):
    """A source whose other end takes commands and answers them."""

    def send(self, command: Command) -> None:
        """Queue the command; never blocks."""

    def take_replies(self) -> list[Reply]:
        """Answers that came since the last call."""

    def resync(self) -> None:
        """What came could not be applied: ask for the whole state."""


@runtime_checkable
class KnowsContents(Protocol):
    """A source that knows what blocks hold, so that nobody has to be asked."""

    def contents(self, rows: Iterable[int]) -> Sequence[BlockContent]:
        """Of each row what it holds now, in the order asked. Any thread; may take a while."""


@runtime_checkable
class Resyncing(Protocol):
    """A source that can begin anew when an update does not fit the state."""

    def resync(self) -> None:
        """What came could not be applied: ask for the whole state."""


@runtime_checkable
class Player(Protocol):
    """A source in which a person moves time, in seconds since a start that does not move."""

    recording: Recording
    has_jumped: bool
    """Whether the update taken last is the first after a seek."""

    @property
    def note(self) -> str:
        """What is wrong with the file, empty when nothing is known to be."""

    @property
    def note_detail(self) -> str:
        """The same at length, a line each."""

    @property
    def position(self) -> float: ...
    @property
    def duration(self) -> float: ...
    @property
    def now_ns(self) -> int:
        """The position, on this machine's monotonic clock."""

    @property
    def taken_ns(self) -> int:
        """The same of the update taken last."""

    @property
    def is_playing(self) -> bool: ...
    @property
    def is_at_end(self) -> bool: ...
    @property
    def speed(self) -> float: ...
    def play(self) -> None: ...
    def pause(self) -> None: ...
    def seek(self, seconds: float, *, with_past: bool = True) -> None: ...
    def seek_event(self, seconds: float, event: Event, *, before: bool = False) -> None:
        """To the frame that tells an event which was at `seconds`, or to the one before that."""

    def step(self, num_frames: int) -> None:
        """Stand still, so many frames further, or back."""

    def set_speed(self, factor: float) -> None: ...
    def resync(self) -> None: ...


def link_of(source: Source) -> LiveLink | None:
    """Return the source if it takes commands, else None."""
    return source if isinstance(source, LiveLink) else None


def contents_of(source: Source) -> KnowsContents | None:
    """Return the source if it knows what blocks hold, else None."""
    return source if isinstance(source, KnowsContents) else None


def resync_of(source: Source) -> Callable[[], None] | None:
    """Return the function to call when an update does not fit the state, or None."""
    return source.resync if isinstance(source, Resyncing) else None


def player_of(source: Source) -> Player | None:
    """Return the source if time can be moved in it, else None."""
    return source if isinstance(source, Player) else None
