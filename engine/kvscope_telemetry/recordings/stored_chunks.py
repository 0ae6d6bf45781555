"""The chunks of a recording's file by what is in them, and their messages one by one.

Owns the lists of chunks, which grow with the file, and what was found damaged: each is left out and counted once. Holds
no file open between calls and, but for what is kept for seeking, at most one chunk in memory. Knows no seconds: times
are by the wall clock, in ns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import zstandard

from kvscope_telemetry.errors import ProtocolError, UnknownMessage
from kvscope_telemetry.messages.leap import Leap, check_leap, decode_leap
from kvscope_telemetry.messages.telemetry import Frame, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.messages.wire import accepted, decode_telemetry, encode
from kvscope_telemetry.recorded import StoredMessage
from kvscope_telemetry.recordings.bundles.bundle import leap_over, leap_past, unpack_bundle
from kvscope_telemetry.recordings.bundles.gathering import num_frames_at_end
from kvscope_telemetry.recordings.bundles.hash_lists import HashLists
from kvscope_telemetry.recordings.bundles.kept_messages import KeptMessages
from kvscope_telemetry.recordings.bundles.leaps.leap_run import FoundLeap, LeapRun
from kvscope_telemetry.recordings.bundles.leaps.opened_leaps import OpenedLeap, opened_leap
from kvscope_telemetry.recordings.bundles.leaps.packed_leaps import packed_leap
from kvscope_telemetry.recordings.bundles.listed_keyframes import listed_keyframe
from kvscope_telemetry.recordings.bundles.placed_parents import Stated, encoded, stated
from kvscope_telemetry.recordings.chunks import Chunk, DamagedChunk, RawMessage, read_chunk
from kvscope_telemetry.recordings.copying.stored_records import StoredRecords, read_records
from kvscope_telemetry.recordings.effort import Watch
from kvscope_telemetry.recordings.layout import (
    BOOKMARKS,
    BUNDLES,
    EVENT_LISTS,
    EVENTS,
    FRAMES,
    HASHES,
    KEYFRAMES,
    LEAPS,
    OTHERS,
    STATE,
    SUMMARIES,
    TEXTS,
)
from kvscope_telemetry.recordings.regular_file import FollowedFile
from kvscope_telemetry.recordings.request_index import TimedMessage
from kvscope_telemetry.recordings.survey import Surveyor, survey
from kvscope_telemetry.state.state_place import StatePlace
from kvscope_telemetry.summaries.bookmark import MAX_BOOKMARKS, Bookmark, decode_bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent, decode_event_list, decode_glances
from kvscope_telemetry.texts.block_texts import RecordedText, decode_text

MAX_BAD_MESSAGES: Final = 100_000
"""So many at most are remembered and counted."""
ROW_BYTES: Final = 32
REQUEST_BYTES: Final = 27
INFO_BYTES: Final = 250
"""Of a block, a request that changed, and one that came, in what was read."""
TOLD: Final = (FRAMES, STATE, OTHERS, KEYFRAMES, BUNDLES)
"""Kinds of messages that tell what was; the others are made of them."""


@dataclass(frozen=True, slots=True)
class _Unbundled:
    """A frame of a bundle, as a message that lies in its chunk."""

    channel: int
    log_time_ns: int
    frame: Frame
    """A leap, where it stands for a whole bundle."""

    @property
    def data(self) -> bytes:
        """As it came."""
        return encode(self.frame)


_Raw = RawMessage | _Unbundled


class StoredChunks:
    """Of the file at `path`. Call `look` first; raises BadInput for what is no recording."""

    def __init__(self, path: Path, kept: KeptMessages | None = None) -> None:
        self.file = FollowedFile(path)
        self._kept = KeptMessages() if kept is None else kept
        self.unknowns = Unknowns()
        """What a later version recorded that has no name here, each time it was met."""
        self._surveyor = Surveyor()
        self.found = self._surveyor.found
        self.told: list[Chunk] = []
        """Those of what was told, in the order of their times."""
        self.leaps: list[Chunk] = []
        self.glances: list[Chunk] = []
        """Those of summaries, events and bookmarks, in the order they were written: an event may be of long before."""
        self.texts: list[Chunk] = []
        """Those of texts of blocks, in the order they were written."""
        self._hash_parts: list[Chunk] = []  # in the order they were written
        self._lists = HashLists(self._parts_from)
        self._unzip = zstandard.ZstdDecompressor()
        self._unbundled_last: tuple[int, list[_Raw]] = (0, [])  # offset of a chunk: who goes on comes back to it
        self._bad_messages: set[tuple[int, int]] = set()  # (offset of the chunk, place in it)

    @property
    def num_bad_messages(self) -> int:
        """Messages left out so far because they cannot be read."""
        return len(self._bad_messages)

    def look(self, watch: Watch | None = None) -> list[Chunk]:
        """Go over what was not looked at; what is new of it, of what was told."""
        fresh = survey(self.file, self._surveyor, watch)
        told, hashes = self._channels(TOLD), self.found.channels[HASHES]
        self._hash_parts += sorted([chunk for chunk in fresh if hashes in chunk.counts], key=lambda chunk: chunk.offset)
        new = [chunk for chunk in fresh if told & chunk.counts.keys()]
        made = [chunk for chunk in fresh if not told & chunk.counts.keys()]
        is_leap = {id(chunk): self.found.channels[LEAPS] in chunk.counts for chunk in made}
        texts = self.found.channels[TEXTS]
        self.texts += sorted([chunk for chunk in made if texts in chunk.counts], key=lambda chunk: chunk.offset)
        others = {texts, hashes}
        glances = [chunk for chunk in made if not is_leap[id(chunk)] and not others & chunk.counts.keys()]
        self.glances += sorted(glances, key=lambda chunk: chunk.offset)
        for into, chunks in ((self.told, new), (self.leaps, [chunk for chunk in made if is_leap[id(chunk)]])):
            in_order = not (into and chunks) or into[-1].start_ns <= chunks[0].start_ns
            into += chunks
            if not in_order:
                into.sort(key=_start)
        return new

    def messages(self, kinds: Collection[int], from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        """Messages of some kinds of what was told, in this time, both included; those that `look` finds meanwhile as
        well."""
        with self.file.open() as file:
            for chunk in self._from(from_ns, until_ns):
                yield from self._decoded(file, chunk, self._channels(kinds), until_ns, from_ns)

    def messages_after(self, where: int, from_ns: int, until_ns: int, place: StatePlace) -> Iterator[TimedMessage]:
        """Frames from the time of a keyframe or leap on, whose chunk is at `where` in the file. What was written before
        it and ended by then is passed over. Where the state at `place` goes on with a chunk as a whole, a leap is in
        the place of its frames, but for the last; `place` is brought along."""
        channels = self._channels((FRAMES,))
        chunks = [chunk for chunk in self._from(from_ns, until_ns) if chunk.counts.keys() & channels]
        chunks = [chunk for chunk in chunks if chunk.offset > where or chunk.end_ns > from_ns]
        with self.file.open() as file:
            for chunk in chunks:
                over = self._leap_over(file, chunk) if chunk is not chunks[-1] else None
                if over is not None and place.is_before(over[1]):
                    place.advance(over[1])
                    yield over
                    continue
                for timed in self._decoded(file, chunk, channels, until_ns, from_ns):
                    if isinstance(timed[1], Frame) and place.is_before(timed[1]):
                        place.advance(timed[1])
                    yield timed

    def newest_first(self, kinds: Collection[int], until_ns: int) -> Iterator[TimedMessage]:
        """The same from `until_ns` backwards."""
        channels = self._channels(kinds)
        with self.file.open() as file:
            for chunk in reversed(self.told[: bisect_right(self.told, until_ns, key=_start)]):
                yield from reversed(list(self._decoded(file, chunk, channels, until_ns)))

    def leaps_on(self, place: StatePlace, from_ns: int, until_ns: int) -> Iterator[FoundLeap]:
        """Leaps that end in this time, one after another, on which the state at `place` goes on; many are read as one.
        `place` is brought along."""
        begin, end = bisect_left(self.leaps, from_ns, key=_start), bisect_right(self.leaps, until_ns, key=_start)
        chunks, at = self.leaps[begin:end], 0
        run = LeapRun(place, self._note_bad_at)
        with self.file.open() as file:
            while at < len(chunks):
                first = chunks[at].offset
                kept = self._kept.get(self.file, first)
                if kept is not None and kept[0] <= until_ns and isinstance(kept[1], Leap) and run.go_on(kept[1]):
                    at = bisect_right(chunks, kept[0], key=_start)
                    yield chunks[at - 1].offset, kept[0], kept[1]
                    continue
                while at < len(chunks) and not run.is_full:
                    yield from self._gather(file, chunks[at], until_ns, run)
                    at += 1
                is_full, found = run.is_full, run.take()
                if is_full and len(found) == 1:
                    self._kept.keep(self.file, first, found[0][1:], _kept_bytes(found[0][2]))
                yield from found

    def _gather(self, file: BinaryIO, chunk: Chunk, until_ns: int, run: LeapRun) -> Iterator[FoundLeap]:
        """Its leap into `run`; one of an earlier version comes back, behind those before it."""
        for place, raw in self._raw(file, chunk, self._channels((LEAPS,)), until_ns):
            leap = self._message(chunk, place, raw)
            if isinstance(leap, OpenedLeap):
                run.add(chunk.offset, raw.log_time_ns, leap)
            elif isinstance(leap, Leap):
                yield from run.take()
                if run.go_on(leap):
                    yield chunk.offset, raw.log_time_ns, leap

    def leap_from(self, at_ns: int) -> int | None:
        """When the first leap ends that does not before `at_ns`; None: there is none."""
        place = bisect_left(self.leaps, at_ns, key=_start)
        return self.leaps[place].start_ns if place < len(self.leaps) else None

    def glances_from(self, from_ns: int) -> Iterator[Summary | TimedEvent]:
        """Summaries and events in the order they were written, of chunks that reach beyond `from_ns`."""
        kinds = tuple(self.found.channels[kind] for kind in (SUMMARIES, EVENTS, EVENT_LISTS))
        with self.file.open() as file:
            for chunk in self.glances:
                if chunk.end_ns < from_ns:
                    continue
                raw = [(place, each.channel, each.data) for place, each in self._raw(file, chunk, kinds, chunk.end_ns)]
                alone = [each for each in raw if each[1] != kinds[2]]
                told = decode_glances([(channel == kinds[1], data) for _, channel, data in alone])
                for place in [place for place, item in enumerate(told) if item is None]:
                    self._note_bad(chunk, alone[place][0])
                yield from filter(None, told)
                for place, _, data in [each for each in raw if each[1] == kinds[2]]:
                    try:
                        yield from decode_event_list(data)
                    except ProtocolError:
                        self._note_bad(chunk, place)

    def bookmarks(self) -> list[Bookmark]:
        """All that was said of bookmarks, in the order it was written; the newest where there is too much of it."""
        said: deque[Bookmark] = deque(maxlen=MAX_BOOKMARKS)
        channel = self.found.channels[BOOKMARKS]
        with self.file.open() as file:
            for chunk in self.glances:
                for place, raw in self._raw(file, chunk, (channel,), chunk.end_ns):
                    try:
                        said.append(decode_bookmark(raw.data))
                    except ProtocolError:
                        self._note_bad(chunk, place)
        return list(said)

    def texts_from(self, from_ns: int) -> Iterator[RecordedText]:
        """Texts of blocks in the order they were written, of chunks that reach beyond `from_ns`."""
        channel = self.found.channels[TEXTS]
        with self.file.open() as file:
            for chunk in list(self.texts):
                if chunk.end_ns < from_ns:
                    continue
                for place, raw in self._raw(file, chunk, (channel,), chunk.end_ns):
                    try:
                        yield decode_text(raw.data)
                    except ProtocolError:
                        self._note_bad(chunk, place)

    def stored(self, from_ns: int, until_ns: int, about: int | None = None) -> Iterator[StoredMessage]:
        """What was told in this time as it was written, keyframes too; it is not decoded. `about`: a block; a leap is
        in the place of the frames of a bundle that say nothing of it."""
        return self.stored_in(self._from(from_ns, until_ns), from_ns, until_ns, about)

    def stored_in(
        self, chunks: Iterable[Chunk], from_ns: int, until_ns: int, about: int | None = None
    ) -> Iterator[StoredMessage]:
        """The same of these chunks alone."""
        kinds = {self.found.channels[kind]: kind for kind in (*TOLD, LEAPS)}
        channels = self._channels((*TOLD, LEAPS))
        with self.file.open() as file:
            for chunk in chunks:
                whole = about if from_ns <= chunk.start_ns and chunk.end_ns <= until_ns else None
                for _, raw in self._raw(file, chunk, channels, until_ns, whole):
                    if max(from_ns, chunk.start_ns) <= raw.log_time_ns <= chunk.end_ns:
                        yield StoredMessage(kinds[raw.channel], raw.log_time_ns, self._as_it_came(raw.data))

    def first_of(self, chunk: Chunk) -> TelemetryMessage | None:
        """What a chunk tells first; None where that cannot be read."""
        with self.file.open() as file:
            timed = next(self._decoded(file, chunk, chunk.counts.keys(), chunk.end_ns), None)
        return None if timed is None else timed[1]

    def records(self, file: BinaryIO, chunk: Chunk) -> StoredRecords:
        """A chunk as it lies in `file`, which is this one. Raises DamagedChunk."""
        is_known = bool(chunk.damage)
        try:
            return read_records(file, chunk, self._unzip)
        except DamagedChunk:
            if chunk.damage and not is_known:
                self.found.damages.append(chunk.where)
            raise

    def _channels(self, kinds: Collection[int]) -> set[int]:
        """Where they lie: frames alone and in bundles."""
        channels = {self.found.channels[kind] for kind in kinds}
        return channels | {self.found.channels[BUNDLES]} if FRAMES in kinds else channels

    def _from(self, from_ns: int, until_ns: int) -> Iterator[Chunk]:
        """Chunks that may hold something of this time."""
        first = max(0, bisect_right(self.told, from_ns, key=_start) - 1)
        while first and self.told[first - 1].end_ns >= from_ns:
            first -= 1
        while first < len(self.told) and self.told[first].start_ns <= until_ns:
            yield self.told[first]
            first += 1

    def _decoded(
        self, file: BinaryIO, chunk: Chunk, channels: Collection[int], until_ns: int, from_ns: int = 0
    ) -> Iterator[TimedMessage]:
        is_keyframe = chunk.counts == {self.found.channels[KEYFRAMES]: 1}
        kept = self._kept.get(self.file, chunk.offset) if is_keyframe and chunk.counts.keys() & channels else None
        if kept is not None:
            if from_ns <= kept[0] <= until_ns:
                yield kept
            return
        for place, raw in self._raw(file, chunk, channels, until_ns):
            if raw.log_time_ns < from_ns:
                continue
            message = self._message(chunk, place, raw)
            if message is not None and not isinstance(message, OpenedLeap):
                timed = raw.log_time_ns, message
                if is_keyframe and isinstance(message, Snapshot):  # another program may have put anything there
                    self._kept.keep(self.file, chunk.offset, timed, _kept_bytes(message))
                yield timed

    def _raw(
        self, file: BinaryIO, chunk: Chunk, channels: Collection[int], until_ns: int, about: int | None = None
    ) -> Iterator[tuple[int, _Raw]]:
        """Messages of these channels not after `until_ns`, with their places in the chunk; frames out of bundles, but
        for those that a leap can pass over that asks for a block."""
        if chunk.damage or not chunk.counts.keys() & channels:
            return
        read = self._read(file, chunk)
        bundles = self.found.channels[BUNDLES]
        has_bundles = bundles in channels and bundles in chunk.counts
        in_order: Sequence[_Raw] = self._unbundled(chunk, read, about) if has_bundles else read
        for place, message in enumerate(in_order):
            if message.channel in channels and message.log_time_ns <= until_ns:
                yield place, message

    def _read(self, file: BinaryIO, chunk: Chunk) -> list[RawMessage]:
        """Its messages; none, and noted, where it is damaged."""
        try:
            return read_chunk(file, chunk, self._unzip)
        except DamagedChunk:
            self.found.damages.append(chunk.where)
            return []

    def _unbundled(self, chunk: Chunk, raw: list[RawMessage], about: int | None = None) -> list[_Raw]:
        """The messages of a chunk with the frames of its bundles, in the order of their times."""
        if self._unbundled_last[0] == chunk.offset:
            return self._unbundled_last[1]
        bundles = self.found.channels[BUNDLES]
        found: list[_Raw] = []
        for place, message in enumerate(raw):
            if message.channel != bundles:
                found.append(message)
            elif num_frames_at_end(message.data) is None:
                try:
                    found += self._frames_of(message.data, about)
                except ProtocolError:
                    self._note_bad(chunk, -1 - place)
        found.sort(key=lambda each: each.log_time_ns)
        if about is None:
            self._unbundled_last = chunk.offset, found
        return found

    def _frames_of(self, bundle: bytes, about: int | None) -> list[_Unbundled]:
        leap = None if about is None else leap_past(bundle, about)
        if leap is not None:
            return [_Unbundled(self.found.channels[LEAPS], *leap)]
        frames = self.found.channels[FRAMES]
        return [_Unbundled(frames, at_ns, frame) for at_ns, frame in unpack_bundle(bundle, self._lists.hashes)]

    def _leap_over(self, file: BinaryIO, chunk: Chunk) -> tuple[int, Leap] | None:
        """The frames of a chunk, which are one bundle, as a leap; None where that cannot be."""
        bundles, frames = self.found.channels[BUNDLES], self.found.channels[FRAMES]
        if frames in chunk.counts or bundles not in chunk.counts or chunk.damage:
            return None
        told = [raw.data for raw in self._read(file, chunk) if raw.channel == bundles]
        found = [data for data in told if num_frames_at_end(data) is None]
        try:
            over = leap_over(found[0], self._lists.hashes) if len(found) == 1 else None
            if over is None or not chunk.start_ns <= over[0] <= chunk.end_ns:
                return None
            leap = accepted(over[1], self.unknowns)
        except ProtocolError:  # noted where its frames are read
            return None
        return (over[0], leap) if isinstance(leap, Leap) else None

    def _parts_from(self, from_ns: int) -> Iterator[bytes]:
        """Parts of lists of hashes, in the order they were written, from about a log time on."""
        channel = self.found.channels[HASHES]
        with self.file.open() as file:
            for chunk in self._hash_parts[bisect_left(self._hash_parts, from_ns, key=_end) :]:
                yield from (raw.data for _, raw in self._raw(file, chunk, (channel,), chunk.end_ns))

    def _message(self, chunk: Chunk, place: int, raw: _Raw) -> TelemetryMessage | OpenedLeap | None:
        try:
            if chunk.start_ns <= raw.log_time_ns <= chunk.end_ns:
                if isinstance(raw, _Unbundled):
                    return accepted(raw.frame, self.unknowns)
                opened = opened_leap(raw.data, self._lists.hashes)
                if opened is not None:
                    return opened
                message = packed_leap(raw.data) or self._whole(raw.data)
                if isinstance(message, Leap):
                    check_leap(message)
                    return message
                if message is not None:
                    return accepted(message, self.unknowns)
                if raw.channel == self.found.channels[LEAPS]:
                    return decode_leap(raw.data)
                return decode_telemetry(raw.data, self.unknowns)
        except UnknownMessage:
            return None
        except ProtocolError:
            pass
        self._note_bad(chunk, place)
        return None

    def _whole(self, data: bytes) -> Stated | None:
        return listed_keyframe(data, self._lists.hashes) or stated(data)

    def _as_it_came(self, data: bytes) -> bytes:
        try:
            message = self._whole(data)
        except ProtocolError:  # nobody can read it
            return data
        return data if message is None else encoded(message)

    def _note_bad(self, chunk: Chunk, place: int) -> None:
        self._note_bad_at(chunk.offset, place)

    def _note_bad_at(self, offset: int, place: int = 0) -> None:
        if len(self._bad_messages) < MAX_BAD_MESSAGES:
            self._bad_messages.add((offset, place))


def _kept_bytes(message: Snapshot | Leap) -> int:
    """What it takes in memory, about."""
    blocks, requests = message.blocks, message.requests
    infos = message.requests_info if isinstance(message, Snapshot) else message.new_requests
    num_bytes = ROW_BYTES * len(blocks.state) + len(blocks.parent)  # a state is a byte
    return num_bytes + REQUEST_BYTES * len(requests.state) + len(requests.table_blocks) + INFO_BYTES * len(infos)


def _start(chunk: Chunk) -> int:
    return chunk.start_ns


def _end(chunk: Chunk) -> int:
    return chunk.end_ns
