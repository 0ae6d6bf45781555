"""The interface for reading what was recorded, which a recording's file and a ring's segments share.

Seconds count from a start that does not move. What is being written grows (`grow`), and a ring loses its oldest
minutes meanwhile: positions before `first_s` are those at `first_s`. One thread reads. Knows no format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import Frame, Hello, MemoryBreakdown, TelemetryMessage
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.recordings.request_index import RecordedRequest, TimedMessage
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent
from kvscope_telemetry.texts.block_texts import RecordedText


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """What is in a recording, as far as it has been looked at."""

    hello: Hello
    """The first one."""
    epochs: tuple[int, ...]
    """Engine starts, in order."""
    duration_s: float
    num_frames: int
    num_chunks: int
    is_complete: bool
    """False for one that was cut short: it ends with its last whole chunk. And for one that is still written."""


class Recorded(Protocol):
    """Read by one thread; `info` and what is said of it in words by any."""

    @property
    def path(self) -> Path:
        """The file, or the folder."""

    @property
    def info(self) -> RecordingInfo:
        """What is in it."""

    @property
    def unknowns(self) -> Unknowns:
        """What a later version recorded that has no name here, each time it was met."""

    @property
    def note(self) -> str:
        """What is wrong with it, in a few words; empty when nothing was found so far."""

    @property
    def detail(self) -> str:
        """What was left out and why, a line each."""

    @property
    def start_ns(self) -> int:
        """Where seconds count from, by the wall clock: nanoseconds since 1970."""

    @property
    def end_ns(self) -> int:
        """When the last message so far was, by the wall clock."""

    @property
    def first_s(self) -> float:
        """Where what there is begins."""

    @property
    def may_grow(self) -> bool:
        """Whether `grow` may find more."""

    def grow(self) -> bool:
        """Look for what was written since, and for what was dropped; returns whether anything changed. Costs little if
        not.
        """

    def frames(self, from_s: float = 0.0, until_s: float | None = None) -> Iterator[Frame]:
        """Frames from `from_s` until `until_s`, both included."""

    def messages(
        self, from_s: float = 0.0, until_s: float | None = None, *, keyframes: bool = False
    ) -> Iterator[tuple[float, TelemetryMessage]]:
        """Seconds and message of all that was recorded in this time, as it came: without keyframes, unless asked."""

    def timed_messages(self, from_ns: int, until_ns: int, *, keyframes: bool) -> Iterator[TimedMessage]:
        """The same by the wall clock, both included."""

    def messages_about(self, block: int, from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        """All that was written in this time (by the wall clock, both included), keyframes too. Empty delta checkpoints
        are in the place of many frames that say nothing of the block."""

    @property
    def has_texts(self) -> bool:
        """Whether prompts and answers can be read in it."""

    def texts(self, from_ns: int = 0) -> Iterator[RecordedText]:
        """What blocks held, in the order it was written, from about `from_ns` on."""

    def overview_items(self, from_ns: int = 0) -> Iterator[Summary | TimedEvent]:
        """Summaries and events that were written, in their order; from about `from_ns` on."""

    def bookmarks(self) -> list[Bookmark]:
        """All that was said of bookmarks, in the order it was written: `settled` says what stands."""

    def run_up(self, seconds: float) -> Iterator[tuple[float, TelemetryMessage]]:
        """Seconds and message of what the state at `seconds` follows from: a snapshot, delta checkpoints, frames."""

    def state_at(self, seconds: float) -> Mirror:
        """The state after the last frame until `seconds`; as it was before, where frames are missing then."""

    def snapshot_before(self, seconds: float) -> float | None:
        """When the newest snapshot or keyframe not after `seconds` was; None before the first."""

    def memory_before(self, seconds: float, epoch: int) -> MemoryBreakdown | None:
        """Where the memory went, as an epoch told last not after `seconds`."""

    def devices_before(self, seconds: float, epoch: int) -> Devices | None:
        """How the devices were, as an epoch told last not after `seconds`, and not long before."""

    def requests(self) -> list[RecordedRequest]:
        """Every request, in the order they were announced; reads all of it."""
