"""Decodes the chunks of a recording file into messages.

Owns the caches between reads (the chunk decoded last; keyframes and delta checkpoints for seeking) and the record of
damaged messages, each of which is skipped and counted once. Must not depend on the list of chunks or on seconds of the
recording; the caller passes in the open file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, Final, TypeVar

import zstandard

from kvscope_telemetry.errors import ProtocolError, UnknownMessage
from kvscope_telemetry.messages.telemetry import DeltaCheckpoint, Frame, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.messages.validity import check_delta_checkpoint
from kvscope_telemetry.messages.wire import accepted, decode_telemetry
from kvscope_telemetry.mirror.state_continuity import StatePosition
from kvscope_telemetry.recordings.chunks import Chunk, DamagedChunk, RawMessage, read_chunk
from kvscope_telemetry.recordings.columns import Columns, claimed_bytes
from kvscope_telemetry.recordings.frame_batch import FrameBatch, TimedFrame
from kvscope_telemetry.recordings.keyframes import joined_checkpoints
from kvscope_telemetry.recordings.layout import CHECKPOINTS, FRAMES, HELLOS, KEYFRAMES, MESSAGES, SNAPSHOTS
from kvscope_telemetry.recordings.survey import Survey

MAX_KEPT_BYTES: Final = 128 << 20
"""Memory limit of the cached keyframes and delta checkpoints. Seeks to nearby times read the same ones."""
ROW_BYTES: Final = 36
"""Approximate bytes in memory per row of a block or request."""
INFO_BYTES: Final = 250
"""Approximate additional bytes in memory per announced request."""
JOINED_CHECKPOINTS: Final = 16
"""Number of delta checkpoints that are merged into one when they are read."""
MAX_BAD_MESSAGES: Final = 100_000
PUBLISHED: Final = (FRAMES, HELLOS, SNAPSHOTS, MESSAGES)
"""Kinds of messages that the engine published. The writer derives the other kinds from them."""

TimedMessage = tuple[int, TelemetryMessage]
"""Log time in ns, and the message."""
_Item = TypeVar("_Item")


class ChunkDecoder:
    """Decodes the chunks of one recording file, which `survey` lists."""

    def __init__(self, found: Survey) -> None:
        self.unknowns = Unknowns()
        """Counts values from a later protocol version that this version cannot name."""
        self._found = found
        self._unzip = zstandard.ZstdDecompressor()
        self._last_read: tuple[int, list[tuple[int, TimedMessage]]] = (0, [])
        """Offset and messages of the chunk decoded last, cached because the next read is often in the same chunk."""
        self._kept: OrderedDict[int, TimedMessage] = OrderedDict()
        """Chunk offset -> its keyframe or delta checkpoint, least recently used first."""
        self._num_kept_bytes = 0
        self._bad_messages: set[tuple[int, int]] = set()  # (offset of the chunk, index in it)
        self._claimed: dict[tuple[int, int], int] = {}  # the same -> claimed size of its columns
        self._num_claimed = 0

    @property
    def num_bad_messages(self) -> int:
        return len(self._bad_messages)

    def channels(self, kinds: Iterable[int]) -> set[int]:
        return {self._found.channels[kind] for kind in kinds}

    def messages(
        self, file: BinaryIO, chunk: Chunk, kinds: Collection[int], about: int | None = None
    ) -> list[TimedMessage]:
        """Return the messages of `kinds` in recorded order. If `about` (a block) is given, only frames that contain it
        are decoded; the others are replaced by empty delta checkpoints.
        """
        if FRAMES not in kinds or self._found.channels[FRAMES] not in chunk.counts:
            return self._messages_of_small_chunk(file, chunk, kinds)
        if about is not None:
            messages = self._read(file, chunk, (*PUBLISHED, KEYFRAMES), about)
        elif self._last_read[0] == chunk.offset:
            messages = self._last_read[1]
        else:
            messages = self._read(file, chunk, (*PUBLISHED, KEYFRAMES))
            self._last_read = chunk.offset, messages
        return [timed for kind, timed in messages if kind in kinds]

    def _messages_of_small_chunk(self, file: BinaryIO, chunk: Chunk, kinds: Collection[int]) -> list[TimedMessage]:
        if chunk.damage or not chunk.counts.keys() & self.channels(kinds):
            return []
        is_state = chunk.counts in ({self._found.channels[SNAPSHOTS]: 1}, {self._found.channels[KEYFRAMES]: 1})
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
        before = self._kept.pop(chunk.offset, None)
        self._num_kept_bytes += _kept_bytes(state) - (0 if before is None else _kept_bytes(before[1]))
        self._kept[chunk.offset] = log_time_ns, state
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= _kept_bytes(self._kept.popitem(last=False)[1][1])

    def _read(
        self, file: BinaryIO, chunk: Chunk, kinds: Collection[int], about: int | None = None
    ) -> list[tuple[int, TimedMessage]]:
        """Return (kind, message) for the chunk's messages of `kinds`, in recorded order."""
        kind_of = {self._found.channels[kind]: kind for kind in kinds}
        read = [(index, raw, kind_of[raw.channel]) for index, raw in self._raw(file, chunk, kind_of)]
        others = [each for each in read if each[2] != FRAMES]
        messages: list[tuple[int, TimedMessage]] = []
        at = 0
        for index, raw, kind in read:
            if kind == FRAMES:
                for before, timed in self._frames(chunk, index, raw, about):
                    messages += self._others(chunk, others[at:before])
                    at = max(at, before)
                    messages.append((FRAMES, timed))
        messages += self._others(chunk, others[at:])
        if len(read) - len(others) > 1:  # another tool merged the batches of several chunks
            messages.sort(key=lambda each: each[1][0])
        return messages

    def _frames(
        self, chunk: Chunk, index: int, raw: RawMessage, about: int | None
    ) -> Iterator[tuple[int, TimedMessage]]:
        """Yield the frames of a batch, each with the number of other messages that precede it."""
        try:
            batch = FrameBatch(self._columns_data(chunk, index, raw))
            befores = batch.messages_before
            found = list(enumerate(batch.frames()) if about is None else batch.about(about))
        except ProtocolError:
            self._record_bad(chunk, index)
            return
        for number, (log_time_ns, frame) in found:
            message = self._accepted(chunk, index, log_time_ns, frame)
            if message is not None:
                yield befores[number], (log_time_ns, message)

    def _others(self, chunk: Chunk, read: Iterable[tuple[int, RawMessage, int]]) -> Iterator[tuple[int, TimedMessage]]:
        for index, raw, kind in read:
            try:
                if kind in (SNAPSHOTS, KEYFRAMES):
                    (snapshot,) = Columns(self._columns_data(chunk, index, raw)).records(Snapshot)
                    message = self._accepted(chunk, index, raw.log_time_ns, snapshot)
                else:
                    self._check_time(chunk, raw.log_time_ns)
                    message = decode_telemetry(raw.data, self.unknowns)
            except UnknownMessage:
                continue
            except (ProtocolError, ValueError):
                self._record_bad(chunk, index)
                continue
            if message is not None:
                yield kind, (raw.log_time_ns, message)

    def _accepted(
        self, chunk: Chunk, index: int, log_time_ns: int, message: TelemetryMessage
    ) -> TelemetryMessage | None:
        """Return `message` with unknown values replaced. A message that fails a check is counted as bad, and None is
        returned.
        """
        try:
            self._check_time(chunk, log_time_ns)
            return accepted(message, self.unknowns)
        except ProtocolError:
            self._record_bad(chunk, index)
            return None

    def items(
        self, file: BinaryIO, chunk: Chunk, decoders: Mapping[int, Callable[[bytes], Iterable[_Item]]]
    ) -> list[_Item]:
        """Return the items that `decoders` (kind -> function) produce from the messages of their kinds."""
        by_channel = {self._found.channels[kind]: decode for kind, decode in decoders.items()}
        items: list[_Item] = []
        for index, raw in self._raw(file, chunk, by_channel):
            try:
                items += by_channel[raw.channel](raw.data)
            except ProtocolError:
                self._record_bad(chunk, index)
        return items

    def joined_frames(self, file: BinaryIO, chunk: Chunk, until_ns: int | None) -> list[TimedFrame] | None:
        """Return the chunk's frames merged, as `FrameBatch.joined` does.

        Returns None if the chunk has frames outside a single batch, or if its decoded messages are cached.
        """
        if self._last_read[0] == chunk.offset:
            return None
        raws = list(self._raw(file, chunk, self.channels((FRAMES,))))
        try:
            batches = [FrameBatch(self._columns_data(chunk, index, raw)) for index, raw in raws]
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
        except ProtocolError:  # counted when its frames are read one by one
            return None

    def checkpoints(
        self, file: BinaryIO, chunks: Sequence[Chunk], index: StatePosition
    ) -> Iterator[tuple[Chunk, int, DeltaCheckpoint | None]]:
        """Yield for each chunk its end time and its delta checkpoint, or None if that is unreadable.

        Up to `JOINED_CHECKPOINTS` checkpoints that continue from `index` and from one another are merged into one.
        """
        for begin in range(0, len(chunks), JOINED_CHECKPOINTS):
            some = chunks[begin : begin + JOINED_CHECKPOINTS]
            is_full = len(some) == JOINED_CHECKPOINTS
            kept = self._kept_state(some[0]) if is_full else None
            if kept is not None and isinstance(kept[1], DeltaCheckpoint) and index.is_before(kept[1]):
                yield some[-1], kept[0], kept[1]
                continue
            read = [self._checkpoint_columns(file, chunk) for chunk in some]
            joined = _joined_on(index, [columns for columns in read if columns is not None])
            if joined is not None and len(read) > 1 and None not in read:
                if is_full:
                    self._keep_state(some[0], some[-1].start_ns, joined)
                yield some[-1], some[-1].start_ns, joined
                continue
            for chunk, columns in zip(some, read, strict=True):
                yield chunk, chunk.start_ns, None if columns is None else self._checkpoint(chunk, columns)

    def _checkpoint_columns(self, file: BinaryIO, chunk: Chunk) -> Columns | None:
        for number, raw in self._raw(file, chunk, self.channels((CHECKPOINTS,))):
            try:
                self._check_time(chunk, raw.log_time_ns)
                return Columns(self._columns_data(chunk, number, raw))
            except ProtocolError:
                self._record_bad(chunk, number)
        return None

    def _checkpoint(self, chunk: Chunk, columns: Columns) -> DeltaCheckpoint | None:
        try:
            (checkpoint,) = columns.records(DeltaCheckpoint)
            check_delta_checkpoint(checkpoint)
        except (ProtocolError, ValueError):
            self._record_bad(chunk, 0)
            return None
        return checkpoint

    def _columns_data(self, chunk: Chunk, index: int, raw: RawMessage) -> bytes:
        """Return the data of a message of columns. Raises ProtocolError once the file's columns claim too much in
        total.
        """
        key = chunk.offset, index
        if key not in self._claimed:
            claimed = claimed_bytes(raw.data)
            if self._num_claimed + claimed > self._found.max_inflated:
                raise ProtocolError(f"columns that claim more than {self._found.max_inflated >> 20} MiB together")
            self._claimed[key] = claimed
            self._num_claimed += claimed
        return raw.data

    def _raw(self, file: BinaryIO, chunk: Chunk, channels: Collection[int]) -> Iterator[tuple[int, RawMessage]]:
        """Yield (index in the chunk, message) for the messages of `channels`; none if the chunk is damaged."""
        if chunk.damage or not chunk.counts.keys() & channels:
            return
        try:
            read = read_chunk(file, chunk, self._unzip)
        except DamagedChunk:
            self._found.damages.append(chunk.where)
            return
        for index, message in enumerate(read):
            if message.channel in channels:
                yield index, message

    @staticmethod
    def _check_time(chunk: Chunk, log_time_ns: int) -> None:
        if not chunk.start_ns <= log_time_ns <= chunk.end_ns:
            raise ProtocolError("a message of another time than its chunk")

    def _record_bad(self, chunk: Chunk, index: int) -> None:
        if len(self._bad_messages) < MAX_BAD_MESSAGES:
            self._bad_messages.add((chunk.offset, index))


def _joined_on(index: StatePosition, parts: Sequence[Columns]) -> DeltaCheckpoint | None:
    """Merge delta checkpoints into one. Returns None if they do not continue from `index` and from one another, or
    cannot be merged.
    """
    seq, leading = index.seq, list[Columns]()
    try:
        for part in parts:
            if part.num_records != 1:
                return None
            since_seq, next_seq, epoch = (part.number(name) for name in ("since_seq", "seq", "epoch"))
            if not leading and epoch == index.epoch and next_seq <= seq:
                continue  # already contained in the keyframe
            if since_seq != seq or epoch != index.epoch:
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
    assert isinstance(state, Snapshot | DeltaCheckpoint), "others are not kept"
    infos = state.requests_info if isinstance(state, Snapshot) else state.new_requests
    num_bytes = ROW_BYTES * len(state.blocks.state) + len(state.blocks.parent)  # one byte per row
    return (
        num_bytes + ROW_BYTES * len(state.requests.state) + len(state.requests.table_blocks) + INFO_BYTES * len(infos)
    )
