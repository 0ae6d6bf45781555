"""Optional capabilities of a source: sending commands, playback, block contents.

Only this module tests which of these a source has.
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
    """Source that sends commands to an engine and receives its replies."""

    def send(self, command: Command) -> None:
        """Enqueue the command without blocking."""

    def poll_replies(self) -> list[Reply]:
        """Return and remove the replies received since the last call."""

    def resync(self) -> None:
        """Request a full snapshot, because an update could not be applied."""


@runtime_checkable
class BlockContentSource(Protocol):
    """Source that has the contents of blocks, such as a recording, so that no engine is needed for them."""

    def contents(self, rows: Iterable[int]) -> Sequence[BlockContent]:
        """Return the current content of each ledger row, in the given order. Thread-safe; may block for a while."""


@runtime_checkable
class Resyncing(Protocol):
    """Source that can restart from a full snapshot when an update does not fit the state."""

    def resync(self) -> None: ...


@runtime_checkable
class Player(Protocol):
    """Source with a movable position in time, in seconds since a fixed start."""

    recording: Recording
    has_jumped: bool
    """Whether the last returned update is the first after a seek."""

    @property
    def damage_summary(self) -> str:
        """Short description of damaged or missing data in the file; empty if no damage is known."""

    @property
    def damage_details(self) -> str:
        """Full description of the defects that `damage_summary` summarizes, one defect per line."""

    @property
    def position(self) -> float: ...
    @property
    def duration(self) -> float: ...
    @property
    def now_ns(self) -> int:
        """The current position (`position`) as a time in ns on this machine's monotonic clock."""

    @property
    def consumed_ns(self) -> int:
        """Time of the last returned update, on this machine's monotonic clock."""

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
        """Seek to the frame that contains `event`, which happened at `seconds`; if `before`, to the frame before it."""

    def step(self, num_frames: int) -> None:
        """Pause and move by `num_frames` frames, backward if negative."""

    def set_speed(self, factor: float) -> None: ...
    def resync(self) -> None: ...


def link_of(source: Source) -> LiveLink | None:
    return source if isinstance(source, LiveLink) else None


def contents_of(source: Source) -> BlockContentSource | None:
    return source if isinstance(source, BlockContentSource) else None


def resync_of(source: Source) -> Callable[[], None] | None:
    """Return the source's function that requests a full snapshot, or None if the source has no such function."""
    return source.resync if isinstance(source, Resyncing) else None


def player_of(source: Source) -> Player | None:
    return source if isinstance(source, Player) else None
