"""The chunks of a recording's file by what is in them, and their messages one by one.

Owns the lists of chunks, which grow with the file, and what was found damaged: each is left out and counted once. Holds
no file open between calls and, but for what is kept for seeking, at most one chunk in memory. Knows no seconds: times
are by the wall clock, in ns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import zstandard

from kvscope_telemetry.errors import ProtocolError, UnknownMessage
from kvscope_telemetry.messages.telemetry import DeltaCheckpoint, Frame, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.messages.validity import check_delta_checkpoint
from kvscope_telemetry.messages.wire import accepted, decode_telemetry
from kvscope_telemetry.recordings.chunks import Chunk, DamagedChunk, RawMessage, read_chunk
from kvscope_telemetry.recordings.columns import Columns, claimed_bytes
from kvscope_telemetry.recordings.frame_batch import FrameBatch, TimedFrame
from kvscope_telemetry.recordings.keyframes import joined_checkpoints
from kvscope_telemetry.recordings.layout import (
    BOOKMARKS,
    CHECKPOINTS,
    EVENTS,
    FRAMES,
    HELLOS,
    KEYFRAMES,
    MESSAGES,
    SNAPSHOTS,
    SUMMARIES,
    TEXTS,
)
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.recordings.regular_file import FollowedFile
from kvscope_telemetry.recordings.request_index import TimedMessage
from kvscope_telemetry.recordings.survey import Surveyor, survey
from kvscope_telemetry.state.continuity import StatePlace
from kvscope_telemetry.summaries.bookmark import MAX_BOOKMARKS, Bookmark, decode_bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent, decode_event_list, decode_summary
from kvscope_telemetry.texts.block_texts import RecordedText, decode_text

MAX_KEPT_BYTES: Final = 128 << 20
"""Of keyframes and delta checkpoints that were read: who looks for a moment comes back to the same ones."""
ROW_BYTES: Final = 36
INFO_BYTES: Final = 250
"""Of a block and of a request in memory, about."""
JOINED_CHECKPOINTS: Final = 16
"""That are read at once."""
MAX_BAD_MESSAGES: Final = 100_000
"""So many at most are remembered and counted."""
CAME: Final = (FRAMES, HELLOS, SNAPSHOTS, MESSAGES)
"""Kinds of what came; the others are made of it."""


class StoredChunks:
    """Of the file at `path`. Call `look` first; raises BadInput for what is no recording."""

    def __init__(self, path: Path) -> None:
        self.file = FollowedFile(path)
        self.unknowns = Unknowns()
        """What a later version recorded that has no name here, each time it was met."""
        self._surveyor = Surveyor()
        self.found = self._surveyor.found
        self.message_chunks: list[Chunk] = []
        """Those of what came and of keyframes, in the order of their times."""
        self.checkpoints: list[Chunk] = []
        self.overview_items: list[Chunk] = []
        """Those of summaries, events and bookmarks, in the order they were written: an event may be of long before."""
        self.texts: list[Chunk] = []
        """Those of texts of blocks, in the order they were written."""
        self._unzip = zstandard.ZstdDecompressor()
        self._last_read: tuple[int, list[tuple[int, TimedMessage]]] = (0, [])
        """What is in the chunk that was read last, by its place: who goes on comes back to it."""
        self._kept: OrderedDict[int, TimedMessage] = OrderedDict()
        """By the place of their chunk; what was not wanted for longest goes first."""
        self._num_kept_bytes = 0
        self._bad_messages: set[tuple[int, int]] = set()  # (offset of the chunk, place in it)
        self._claimed: dict[tuple[int, int], int] = {}  # the same -> what its columns take
        self._num_claimed = 0

    @property
    def num_bad_messages(self) -> int:
        """Messages left out so far because they cannot be read."""
        return len(self._bad_messages)

    def look(self, watch: ProgressCallback | None = None) -> list[Chunk]:
        """Go over what was not looked at; what is new of it, of what was told."""
        fresh = survey(self.file, self._surveyor, watch)
        messages, checkpoints, texts = (
            self._channels(kinds) for kinds in ((*CAME, KEYFRAMES), (CHECKPOINTS,), (TEXTS,))
        )
        new = [chunk for chunk in fresh if messages & chunk.counts.keys()]
        made = [chunk for chunk in fresh if not messages & chunk.counts.keys()]
        by_place = sorted(made, key=lambda chunk: chunk.offset)
        self.texts += [chunk for chunk in by_place if texts & chunk.counts.keys()]
        self.overview_items += [chunk for chunk in by_place if not (texts | checkpoints) & chunk.counts.keys()]
        for into, chunks in (
            (self.message_chunks, new),
            (self.checkpoints, [chunk for chunk in made if checkpoints & chunk.counts.keys()]),
        ):
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
                for timed in self._messages_in(file, chunk, kinds):
                    if from_ns <= timed[0] <= until_ns:
                        yield timed

    def messages_about(self, block: int, from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        """All that was told in this time, keyframes too; delta checkpoints that say nothing are in the place of frames
        that say nothing of a block."""
        with self.file.open() as file:
            for chunk in self._from(from_ns, until_ns):
                is_whole = from_ns <= chunk.start_ns and chunk.end_ns <= until_ns
                for timed in self._messages_in(file, chunk, (*CAME, KEYFRAMES), block if is_whole else None):
                    if from_ns <= timed[0] <= until_ns:
                        yield timed

    def frames_on(self, place: StatePlace, where: int, from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        """Frames from the time of a state on, whose chunk is at `where` in the file. What was written before it and
        ended by then is passed over. Where the state at `place` goes on with a batch, a delta checkpoint is in the
        place of its frames, but for the last of all; `place` is brought along."""
        channels = self._channels((FRAMES, MESSAGES))
        chunks = [chunk for chunk in self._from(from_ns, until_ns) if chunk.counts.keys() & channels]
        chunks = [chunk for chunk in chunks if chunk.offset > where or chunk.end_ns > from_ns]
        with self.file.open() as file:
            for chunk in chunks:
                is_whole = chunk.end_ns <= until_ns and chunk is not chunks[-1]
                joined = self._joined(file, chunk, None if is_whole else until_ns)
                if joined is not None and (not joined or place.is_before(joined[0][1])):
                    for log_time_ns, frame in joined:
                        place.advance(frame)
                        yield log_time_ns, frame
                    continue
                for timed in self._messages_in(file, chunk, (FRAMES, MESSAGES)):
                    if isinstance(timed[1], Frame) and from_ns <= timed[0] <= until_ns:
                        if place.is_before(timed[1]):
                            place.advance(timed[1])
                        yield timed

    def newest_first(self, kinds: Collection[int], until_ns: int) -> Iterator[TimedMessage]:
        """The same from `until_ns` backwards."""
        channels = self._channels(kinds)
        with self.file.open() as file:
            for chunk in reversed(self.message_chunks[: bisect_right(self.message_chunks, until_ns, key=_start)]):
                if not chunk.counts.keys() & channels:
                    continue
                for timed in reversed(self._messages_in(file, chunk, kinds)):
                    if timed[0] <= until_ns:
                        yield timed

    def state_on(self, place: StatePlace, from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        """Delta checkpoints from the time of a state on until about `until_ns`, then frames, on which the state at
        `place` goes on; frames as well in the place of delta checkpoints that cannot be read. `place` is brought along.
        """
        where = 0
        before_ns = from_ns  # when the checkpoint before was, readable or not
        first = bisect_left(self.checkpoints, from_ns, key=_start)
        chunks = self.checkpoints[first : bisect_right(self.checkpoints, until_ns, key=_start)]
        for chunk, log_time_ns, checkpoint in self._checkpoints_in(chunks, place):
            if checkpoint is not None:
                if place.epoch == checkpoint.epoch and place.seq < checkpoint.since_seq:
                    for at_ns, frame in self.frames_on(place, where, from_ns, before_ns):
                        yield at_ns, frame
                        from_ns = at_ns
                if place.is_before(checkpoint):
                    place.advance(checkpoint)
                    yield log_time_ns, checkpoint
                    where, from_ns = chunk.offset, log_time_ns
            before_ns = chunk.start_ns
        yield from self.frames_on(place, where, from_ns, until_ns)

    def checkpoint_from(self, at_ns: int) -> int | None:
        """When the first delta checkpoint ends that does not before `at_ns`; None: there is none."""
        place = bisect_left(self.checkpoints, at_ns, key=_start)
        return self.checkpoints[place].start_ns if place < len(self.checkpoints) else None

    def glances_from(self, from_ns: int) -> Iterator[Summary | TimedEvent]:
        """Summaries and events in the order they were written, of chunks that reach beyond `from_ns`."""
        summaries, events = (self.found.channels[kind] for kind in (SUMMARIES, EVENTS))
        with self.file.open() as file:
            for chunk in self.overview_items:
                if chunk.end_ns < from_ns:
                    continue
                for place, raw in self._raw(file, chunk, (summaries, events)):
                    try:
                        if raw.channel == summaries:
                            yield decode_summary(raw.data)
                        else:
                            yield from decode_event_list(raw.data)
                    except ProtocolError:
                        self._note_bad(chunk, place)

    def bookmarks(self) -> list[Bookmark]:
        """All that was said of bookmarks, in the order it was written; the newest where there is too much of it."""
        said: deque[Bookmark] = deque(maxlen=MAX_BOOKMARKS)
        channel = self.found.channels[BOOKMARKS]
        with self.file.open() as file:
            for chunk in self.overview_items:
                for place, raw in self._raw(file, chunk, (channel,)):
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
                for place, raw in self._raw(file, chunk, (channel,)):
                    try:
                        yield decode_text(raw.data)
                    except ProtocolError:
                        self._note_bad(chunk, place)

    def _channels(self, kinds: Iterable[int]) -> set[int]:
        return {self.found.channels[kind] for kind in kinds}

    def _from(self, from_ns: int, until_ns: int) -> Iterator[Chunk]:
        """Chunks that may hold something of this time."""
        first = max(0, bisect_right(self.message_chunks, from_ns, key=_start) - 1)
        while first and self.message_chunks[first - 1].end_ns >= from_ns:
            first -= 1
        while first < len(self.message_chunks) and self.message_chunks[first].start_ns <= until_ns:
            yield self.message_chunks[first]
            first += 1

    def _messages_in(
        self, file: BinaryIO, chunk: Chunk, kinds: Collection[int], about: int | None = None
    ) -> list[TimedMessage]:
        """The messages of these kinds as they came; of frames, where a block is given, those that name it."""
        if FRAMES not in kinds or self.found.channels[FRAMES] not in chunk.counts:
            return self._messages_of_small_chunk(file, chunk, kinds)
        if about is not None:
            messages = self._read(file, chunk, (*CAME, KEYFRAMES), about)
        elif self._last_read[0] == chunk.offset:
            messages = self._last_read[1]
        else:
            messages = self._read(file, chunk, (*CAME, KEYFRAMES))
            self._last_read = chunk.offset, messages
        return [timed for kind, timed in messages if kind in kinds]

    def _messages_of_small_chunk(self, file: BinaryIO, chunk: Chunk, kinds: Collection[int]) -> list[TimedMessage]:
        """Of a chunk without frames."""
        if chunk.damage or not chunk.counts.keys() & self._channels(kinds):
            return []
        is_state = chunk.counts in ({self.found.channels[SNAPSHOTS]: 1}, {self.found.channels[KEYFRAMES]: 1})
        kept = self._kept_state(chunk) if is_state else None
        if kept is not None:
            return [kept]
        messages = [timed for _, timed in self._read(file, chunk, kinds)]
        if is_state and len(messages) == 1 and isinstance(messages[0][1], Snapshot):
            self._keep_state(chunk, *messages[0])
        return messages

    def _kept_state(self, chunk: Chunk) -> TimedMessage | None:
        kept = self._kept.get(chunk.offset)
        if kept is not None:
            self._kept.move_to_end(chunk.offset)
        return kept

    def _keep_state(self, chunk: Chunk, log_time_ns: int, state: TelemetryMessage) -> None:
        """In the place of those that were not wanted for longest."""
        before = self._kept.pop(chunk.offset, None)
        self._num_kept_bytes += _kept_bytes(state) - (0 if before is None else _kept_bytes(before[1]))
        self._kept[chunk.offset] = log_time_ns, state
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= _kept_bytes(self._kept.popitem(last=False)[1][1])

    def _read(
        self, file: BinaryIO, chunk: Chunk, kinds: Collection[int], about: int | None = None
    ) -> list[tuple[int, TimedMessage]]:
        """The same with the kind of each."""
        kind_of = {self.found.channels[kind]: kind for kind in kinds}
        read = [(place, raw, kind_of[raw.channel]) for place, raw in self._raw(file, chunk, kind_of)]
        others = [each for each in read if each[2] != FRAMES]
        messages: list[tuple[int, TimedMessage]] = []
        at = 0
        for place, raw, kind in read:
            if kind == FRAMES:
                for before, timed in self._frames(chunk, place, raw, about):
                    messages += self._messages(chunk, others[at:before])
                    at = max(at, before)
                    messages.append((FRAMES, timed))
        messages += self._messages(chunk, others[at:])
        if len(read) - len(others) > 1:  # another tool put the batches of several chunks into one
            messages.sort(key=lambda each: each[1][0])
        return messages

    def _frames(
        self, chunk: Chunk, place: int, raw: RawMessage, about: int | None
    ) -> Iterator[tuple[int, TimedMessage]]:
        """The frames of a batch, with how many of the other messages come before each."""
        try:
            batch = FrameBatch(self._columns_data(chunk, place, raw))
            befores = batch.messages_before
            found = list(enumerate(batch.frames()) if about is None else batch.about(about))
        except ProtocolError:
            self._note_bad(chunk, place)
            return
        for number, (log_time_ns, frame) in found:
            message = self._accepted(chunk, place, log_time_ns, frame)
            if message is not None:
                yield befores[number], (log_time_ns, message)

    def _messages(
        self, chunk: Chunk, read: Iterable[tuple[int, RawMessage, int]]
    ) -> Iterator[tuple[int, TimedMessage]]:
        for place, raw, kind in read:
            try:
                if kind in (SNAPSHOTS, KEYFRAMES):
                    (snapshot,) = Columns(self._columns_data(chunk, place, raw)).records(Snapshot)
                    message = self._accepted(chunk, place, raw.log_time_ns, snapshot)
                else:
                    self._check_time(chunk, raw.log_time_ns)
                    message = decode_telemetry(raw.data, self.unknowns)
            except UnknownMessage:
                continue
            except (ProtocolError, ValueError):
                self._note_bad(chunk, place)
                continue
            if message is not None:
                yield kind, (raw.log_time_ns, message)

    def _accepted(
        self, chunk: Chunk, place: int, log_time_ns: int, message: TelemetryMessage
    ) -> TelemetryMessage | None:
        """Checked, in words of this version; None where it does not hold."""
        try:
            self._check_time(chunk, log_time_ns)
            return accepted(message, self.unknowns)
        except ProtocolError:
            self._note_bad(chunk, place)
            return None

    def _joined(self, file: BinaryIO, chunk: Chunk, until_ns: int | None) -> list[TimedFrame] | None:
        """As `FrameBatch.joined`; None as well where a chunk has other frames than those of one batch, or they are at
        hand as they came."""
        if self._last_read[0] == chunk.offset:
            return None
        raws = list(self._raw(file, chunk, self._channels((FRAMES,))))
        try:
            batches = [FrameBatch(self._columns_data(chunk, place, raw)) for place, raw in raws]
            if [batch.num_frames for batch in batches] != [chunk.num_frames]:
                return None
            joined = batches[0].joined(until_ns)
            if joined is None:
                return None
            for at, (log_time_ns, frame) in enumerate(joined):
                self._check_time(chunk, log_time_ns)
                known = accepted(frame, self.unknowns)
                assert isinstance(known, Frame), "a frame stays one"
                joined[at] = log_time_ns, known
            return joined
        except ProtocolError:  # noted where its frames are read
            return None

    def _checkpoints_in(
        self, chunks: Sequence[Chunk], place: StatePlace
    ) -> Iterator[tuple[Chunk, int, DeltaCheckpoint | None]]:
        """Of each chunk the delta checkpoint, and when it ends; None where it cannot be read. Those that lead on from
        `place` and one another are joined, many at once."""
        with self.file.open() as file:
            for begin in range(0, len(chunks), JOINED_CHECKPOINTS):
                some = chunks[begin : begin + JOINED_CHECKPOINTS]
                is_full = len(some) == JOINED_CHECKPOINTS
                kept = self._kept_state(some[0]) if is_full else None
                if kept is not None and isinstance(kept[1], DeltaCheckpoint) and place.is_before(kept[1]):
                    yield some[-1], kept[0], kept[1]
                    continue
                read = [self._checkpoint_columns(file, chunk) for chunk in some]
                joined = _joined_on(place, [columns for columns in read if columns is not None])
                if joined is not None and len(read) > 1 and None not in read:
                    if is_full:
                        self._keep_state(some[0], some[-1].start_ns, joined)
                    yield some[-1], some[-1].start_ns, joined
                    continue
                for chunk, columns in zip(some, read, strict=True):
                    yield chunk, chunk.start_ns, None if columns is None else self._checkpoint(chunk, columns)

    def _checkpoint_columns(self, file: BinaryIO, chunk: Chunk) -> Columns | None:
        for number, raw in self._raw(file, chunk, self._channels((CHECKPOINTS,))):
            try:
                self._check_time(chunk, raw.log_time_ns)
                return Columns(self._columns_data(chunk, number, raw))
            except ProtocolError:
                self._note_bad(chunk, number)
        return None

    def _checkpoint(self, chunk: Chunk, columns: Columns) -> DeltaCheckpoint | None:
        try:
            (checkpoint,) = columns.records(DeltaCheckpoint)
            check_delta_checkpoint(checkpoint)
        except (ProtocolError, ValueError):
            self._note_bad(chunk, 0)
            return None
        return checkpoint

    def _columns_data(self, chunk: Chunk, place: int, raw: RawMessage) -> bytes:
        """Of a message of columns. Raises ProtocolError once all of them together claim too much."""
        key = chunk.offset, place
        if key not in self._claimed:
            claimed = claimed_bytes(raw.data)
            if self._num_claimed + claimed > self.found.max_inflated:
                raise ProtocolError(f"columns that claim more than {self.found.max_inflated >> 20} MiB together")
            self._claimed[key] = claimed
            self._num_claimed += claimed
        return raw.data

    def _raw(self, file: BinaryIO, chunk: Chunk, channels: Collection[int]) -> Iterator[tuple[int, RawMessage]]:
        """Messages of these channels, with their places in the chunk."""
        if chunk.damage or not chunk.counts.keys() & channels:
            return
        try:
            read = read_chunk(file, chunk, self._unzip)
        except DamagedChunk:
            self.found.damages.append(chunk.where)
            return
        for place, message in enumerate(read):
            if message.channel in channels:
                yield place, message

    @staticmethod
    def _check_time(chunk: Chunk, log_time_ns: int) -> None:
        if not chunk.start_ns <= log_time_ns <= chunk.end_ns:
            raise ProtocolError("a message of another time than its chunk")

    def _note_bad(self, chunk: Chunk, place: int) -> None:
        if len(self._bad_messages) < MAX_BAD_MESSAGES:
            self._bad_messages.add((chunk.offset, place))


def _joined_on(place: StatePlace, parts: Sequence[Columns]) -> DeltaCheckpoint | None:
    """Delta checkpoints as one; None where they do not lead on from `place` and one another, or cannot be joined."""
    seq, leading = place.seq, list[Columns]()
    try:
        for part in parts:
            if part.num_records != 1:
                return None
            since_seq, next_seq, epoch = (part.number(name) for name in ("since_seq", "seq", "epoch"))
            if not leading and epoch == place.epoch and next_seq <= seq:
                continue  # it leads to the keyframe
            if since_seq != seq or epoch != place.epoch:
                return None
            leading.append(part)
            seq = next_seq
        if not leading:
            return None
        joined = joined_checkpoints(leading)
        check_delta_checkpoint(joined)
    except ProtocolError:
        return None
    return joined


def _kept_bytes(state: TelemetryMessage) -> int:
    """What a keyframe or a delta checkpoint takes in memory, about."""
    assert isinstance(state, Snapshot | DeltaCheckpoint), "others are not kept"
    infos = state.requests_info if isinstance(state, Snapshot) else state.new_requests
    num_bytes = ROW_BYTES * len(state.blocks.state) + len(state.blocks.parent)  # a state is a byte
    return (
        num_bytes + ROW_BYTES * len(state.requests.state) + len(state.requests.table_blocks) + INFO_BYTES * len(infos)
    )


def _start(chunk: Chunk) -> int:
    return chunk.start_ns
