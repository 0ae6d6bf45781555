"""The chunks of recordings one after another in the order they were written, and which of them are taken as they lie.

Owns where the middle of a saved part begins and ends. What is laid out otherwise than this version writes is
`NotAsWritten`: it is told anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvscope_telemetry.recorded import Recorded, StoredMessage
from kvscope_telemetry.recordings.chunks import Chunk
from kvscope_telemetry.recordings.layout import (
    BOOKMARKS,
    BUNDLES,
    EVENT_LISTS,
    EVENTS,
    FRAMES,
    KEYFRAMES,
    LEAPS,
    OTHERS,
    STATE,
    SUMMARIES,
    TEXTS,
)
from kvscope_telemetry.recordings.piecewise_writer import COMPRESSION
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.timeline.tape import Tape

_TOLD: Final = frozenset((FRAMES, STATE, OTHERS, BUNDLES))
_GLANCES: Final = frozenset((SUMMARIES, EVENTS, EVENT_LISTS))
_BESIDE: Final = frozenset((BOOKMARKS, TEXTS))


class NotAsWritten(Exception):
    """Chunks that cannot be taken as they lie; says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of one of the files."""

    recording: Recording
    chunk: Chunk
    kind: int
    """KEYFRAMES, LEAPS or HASHES; FRAMES for all that came as it is, SUMMARIES for what a glance needs, 0 for what is
    not taken."""
    is_head: bool
    """It begins a file that goes on from the one before, and says nothing new."""
    begins_file: bool
    """It comes right after such a one."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a range: what is told anew at its begin, what is taken as it lies, and what is told anew at its end."""

    pieces: Sequence[Piece]
    first: int
    """The leap or keyframe up to which it is told anew."""
    end: int
    """Behind the last that is taken."""

    @property
    def boundary_ns(self) -> int:
        """When the state is that the middle goes on from."""
        return self.pieces[self.first].chunk.end_ns

    @property
    def middle(self) -> Sequence[Piece]:
        """What is taken as it lies."""
        return self.pieces[self.first + 1 : self.end]


def parts_of(recorded: Recorded, from_ns: int, until_ns: int) -> Parts:
    """Of the range. Raises NotAsWritten where there is nothing to take."""
    pieces = [piece for number, file in enumerate(_files(recorded, from_ns)) for piece in _pieces(file, number)]
    seekable = (
        place
        for place, piece in enumerate(pieces)
        if piece.kind in (KEYFRAMES, LEAPS) and piece.chunk.start_ns >= from_ns
    )
    first = next(seekable, len(pieces))
    end = next(
        (
            place
            for place in range(first + 1, len(pieces))
            if _is_over(pieces[place], until_ns) or pieces[place].chunk.is_doubtful
        ),
        len(pieces),
    )
    if end <= first + 1:
        raise NotAsWritten("no whole chunk lies in it")
    return Parts(pieces, first, end)


def messages_of(pieces: Sequence[Piece], from_ns: int, until_ns: int) -> Iterator[StoredMessage]:
    """What was told in them in this time, as it came."""
    for piece in pieces:
        is_meant = piece.kind == FRAMES and not piece.is_head
        if is_meant and piece.chunk.start_ns <= until_ns and piece.chunk.end_ns >= from_ns:
            yield from piece.recording.chunks.stored_in((piece.chunk,), from_ns, until_ns)


def _files(recorded: Recorded, from_ns: int) -> list[Recording]:
    files = recorded.segments if isinstance(recorded, Tape) else [recorded] if isinstance(recorded, Recording) else []
    return [file for file in files if file.end_ns >= from_ns]


def _pieces(file: Recording, number: int) -> Iterator[Piece]:
    channels = {channel: kind for kind, channel in file.chunks.found.channels.items()}
    for place, chunk in enumerate(sorted(file.chunks.found.chunks, key=lambda chunk: chunk.offset)):
        kinds = frozenset(channels.get(channel, 0) for channel in chunk.counts)
        kind = _kind(kinds)
        is_ours = chunk.compression == COMPRESSION and kinds == chunk.counts.keys()
        if kind and (chunk.damage or not is_ours):
            raise NotAsWritten(chunk.damage or "another tool wrote it")
        is_head = bool(number) and not place
        if is_head and (chunk.counts != {STATE: 1}):
            raise NotAsWritten("it goes on from nothing before")
        yield Piece(file, chunk, kind, is_head, bool(number) and place == 1)


def _kind(kinds: frozenset[int]) -> int:
    if kinds <= _TOLD:
        return FRAMES
    if kinds <= _GLANCES:
        return SUMMARIES
    if kinds <= _BESIDE or kinds == {0}:
        return 0
    if len(kinds) == 1:
        return next(iter(kinds))
    raise NotAsWritten("another tool wrote it")


def _is_over(piece: Piece, until_ns: int) -> bool:
    return piece.kind in (FRAMES, KEYFRAMES, LEAPS) and piece.chunk.end_ns > until_ns
