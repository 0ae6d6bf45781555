"""Decodes the chunks of a recording file into messages.

Owns the caches between reads (the chunk decoded last; keyframes and delta checkpoints for seeking) and the record of
damaged messages, each of which is skipped and counted once. Must not depend on the list of chunks or on positions in
seconds; the caller passes in the open file.
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

MAX_CACHED_BYTES: Final = 128 << 20
"""Memory limit of the cached keyframes and delta checkpoints. Seeks to nearby times read the same ones."""
ROW_BYTES: Final = 36
"""Approximate bytes in memory per row of a cached message. A row is that of one block or one request."""
INFO_BYTES: Final = 250
"""Approximate additional bytes in memory for each request that a cached message announces."""
JOINED_CHECKPOINTS: Final = 16
"""Number of delta checkpoints that are merged into one when they are read."""
MAX_BAD_MESSAGES: Final = 100_000
PUBLISHED: Final = (FRAMES, HELLOS, SNAPSHOTS, MESSAGES)
"""Kinds of messages that the engine published. The writer derives the other kinds from them."""

TimedMessage = tuple[int, TelemetryMessage]
"""Log time in ns, and the message."""
_Item = TypeVar("_Item")


class ChunkDecoder:
    """Decodes the chunks of one recording file. `survey` is the result of opening the file."""

    def __init__(self, survey: Survey) -> None:
        self.unknowns = Unknowns()
        """Counts values from a later protocol version that this version cannot name."""
        self._survey = survey
        self._decompressor = zstandard.ZstdDecompressor()
        self._last_read: tuple[int, list[tuple[int, TimedMessage]]] = (0, [])
        """Offset and messages of the chunk decoded last, cached because the next read is often in the same chunk."""
        self._cached_states: OrderedDict[int, TimedMessage] = OrderedDict()
        self._num_cached_bytes = 0
        self._bad_messages: set[tuple[int, int]] = set()  # (offset of the chunk, index in it)
        self._claimed_bytes: dict[tuple[int, int], int] = {}  # (offset, index) -> claimed size of its columns
        self._num_claimed_bytes = 0

    @property
    def num_bad_messages(self) -> int:
        return len(self._bad_messages)

    def channels(self, kinds: Iterable[int]) -> set[int]:
        return {self._survey.channels[kind] for kind in kinds}

    def messages(
        self, file: BinaryIO, chunk: Chunk, kinds: Collection[int], block: int | None = None
    ) -> list[TimedMessage]:
        """Return the messages of `kinds` in recorded order. If `block` is given, only frames that contain it
        are decoded; the others are replaced by empty delta checkpoints.
        """
        if FRAMES not in kinds or self._survey.channels[FRAMES] not in chunk.counts:
            return self._messages_without_frames(file, chunk, kinds)
        if block is not None:
            messages = self._read(file, chunk, (*PUBLISHED, KEYFRAMES), block)
        elif self._last_read[0] == chunk.offset:
            messages = self._last_read[1]
        else:
            messages = self._read(file, chunk, (*PUBLISHED, KEYFRAMES))
            self._last_read = chunk.offset, messages
        return [timed for kind, timed in messages if kind in kinds]

    def _messages_without_frames(self, file: BinaryIO, chunk: Chunk, kinds: Collection[int]) -> list[TimedMessage]:
        if chunk.damage or not chunk.counts.keys() & self.channels(kinds):
            return []
        is_state = chunk.counts in ({self._survey.channels[SNAPSHOTS]: 1}, {self._survey.channels[KEYFRAMES]: 1})
        cached = self._cached_state(chunk) if is_state else None
        if cached is not None:
            return [cached]
        messages = [timed for _, timed in self._read(file, chunk, kinds)]
        if is_state and len(messages) == 1 and isinstance(messages[0][1], Snapshot):
            self._cache_state(chunk, *messages[0])
        return messages

    def _cached_state(self, chunk: Chunk) -> TimedMessage | None:
        cached = self._cached_states.get(chunk.offset)
        if cached is not None:
            self._cached_states.move_to_end(chunk.offset)
        return cached

    def _cache_state(self, chunk: Chunk, log_time_ns: int, state: TelemetryMessage) -> None:
        previous = self._cached_states.pop(chunk.offset, None)
        self._num_cached_bytes += _state_bytes(state) - (0 if previous is None else _state_bytes(previous[1]))
        self._cached_states[chunk.offset] = log_time_ns, state
        while self._num_cached_bytes > MAX_CACHED_BYTES:
            self._num_cached_bytes -= _state_bytes(self._cached_states.popitem(last=False)[1][1])

    def _read(
        self, file: BinaryIO, chunk: Chunk, kinds: Collection[int], block: int | None = None
    ) -> list[tuple[int, TimedMessage]]:
        """Return (kind, message) for the chunk's messages of `kinds`, in recorded order."""
        kind_of = {self._survey.channels[kind]: kind for kind in kinds}
        raw_messages = [(index, raw, kind_of[raw.channel]) for index, raw in self._raw_messages(file, chunk, kind_of)]
        others = [each for each in raw_messages if each[2] != FRAMES]
        messages: list[tuple[int, TimedMessage]] = []
        num_emitted = 0
        for index, raw, kind in raw_messages:
            if kind == FRAMES:
                for num_before, timed in self._batch_frames(chunk, index, raw, block):
                    messages += self._other_messages(chunk, others[num_emitted:num_before])
                    num_emitted = max(num_emitted, num_before)
                    messages.append((FRAMES, timed))
        messages += self._other_messages(chunk, others[num_emitted:])
        if len(raw_messages) - len(others) > 1:  # another tool merged the batches of several chunks
            messages.sort(key=lambda each: each[1][0])
        return messages

    def _batch_frames(
        self, chunk: Chunk, index: int, raw: RawMessage, block: int | None
    ) -> Iterator[tuple[int, TimedMessage]]:
        """Yield (number of messages before the frame, (log time, frame)) for the frames of a batch. The number
        counts the chunk's messages that are not frames.
        """
        try:
            batch = FrameBatch(self._columns_data(chunk, index, raw))
            messages_before = batch.messages_before
            frames = list(enumerate(batch.frames()) if block is None else batch.frames_with_block(block))
        except ProtocolError:
            self._record_bad_message(chunk, index)
            return
        for frame_index, (log_time_ns, frame) in frames:
            message = self._accepted_message(chunk, index, log_time_ns, frame)
            if message is not None:
                yield messages_before[frame_index], (log_time_ns, message)

    def _other_messages(
        self, chunk: Chunk, raw_messages: Iterable[tuple[int, RawMessage, int]]
    ) -> Iterator[tuple[int, TimedMessage]]:
        for index, raw, kind in raw_messages:
            try:
                if kind in (SNAPSHOTS, KEYFRAMES):
                    (snapshot,) = Columns(self._columns_data(chunk, index, raw)).records(Snapshot)
                    message = self._accepted_message(chunk, index, raw.log_time_ns, snapshot)
                else:
                    self._check_time(chunk, raw.log_time_ns)
                    message = decode_telemetry(raw.data, self.unknowns)
            except UnknownMessage:
                continue
            except (ProtocolError, ValueError):
                self._record_bad_message(chunk, index)
                continue
            if message is not None:
                yield kind, (raw.log_time_ns, message)

    def _accepted_message(
        self, chunk: Chunk, index: int, log_time_ns: int, message: TelemetryMessage
    ) -> TelemetryMessage | None:
        """Return `message` with unknown values replaced. A message that fails a check is counted as bad, and None is
        returned.
        """
        try:
            self._check_time(chunk, log_time_ns)
            return accepted(message, self.unknowns)
        except ProtocolError:
            self._record_bad_message(chunk, index)
            return None

    def items(
        self, file: BinaryIO, chunk: Chunk, decoders: Mapping[int, Callable[[bytes], Iterable[_Item]]]
    ) -> list[_Item]:
        """Return the items that `decoders` produce from the messages of their kinds. `decoders` maps a kind to a
        function.
        """
        by_channel = {self._survey.channels[kind]: decode for kind, decode in decoders.items()}
        items: list[_Item] = []
        for index, raw in self._raw_messages(file, chunk, by_channel):
            try:
                items += by_channel[raw.channel](raw.data)
            except ProtocolError:
                self._record_bad_message(chunk, index)
        return items

    def joined_frames(self, file: BinaryIO, chunk: Chunk, until_ns: int | None) -> list[TimedFrame] | None:
        """Return the chunk's frames up to `until_ns` merged into a delta checkpoint (`FrameBatch.joined`).

        Returns None if the chunk has frames outside a single batch, or if its decoded messages are cached.
        """
        if self._last_read[0] == chunk.offset:
            return None
        raw_messages = list(self._raw_messages(file, chunk, self.channels((FRAMES,))))
        try:
            batches = [FrameBatch(self._columns_data(chunk, index, raw)) for index, raw in raw_messages]
            if [batch.num_frames for batch in batches] != [chunk.num_frames]:
                return None
            frames = batches[0].joined(until_ns)
            if frames is None:
                return None
            for frame_index, (log_time_ns, frame) in enumerate(frames):
                self._check_time(chunk, log_time_ns)
                accepted_frame = accepted(frame, self.unknowns)
                assert isinstance(accepted_frame, Frame), "a frame stays one"
                frames[frame_index] = log_time_ns, accepted_frame
            return frames
        except ProtocolError:  # counted when its frames are read one by one
            return None

    def checkpoints(
        self, file: BinaryIO, chunks: Sequence[Chunk], position: StatePosition
    ) -> Iterator[tuple[Chunk, int, DeltaCheckpoint | None]]:
        """Yield, for each chunk in `chunks`, the chunk, its end time, and its delta checkpoint, or None if that is
        unreadable.

        Up to `JOINED_CHECKPOINTS` checkpoints that continue from `position` and from one another are merged into one.
        """
        for begin in range(0, len(chunks), JOINED_CHECKPOINTS):
            group = chunks[begin : begin + JOINED_CHECKPOINTS]
            is_full = len(group) == JOINED_CHECKPOINTS
            cached = self._cached_state(group[0]) if is_full else None
            if cached is not None and isinstance(cached[1], DeltaCheckpoint) and position.is_before(cached[1]):
                yield group[-1], cached[0], cached[1]
                continue
            group_columns = [self._checkpoint_columns(file, chunk) for chunk in group]
            merged = _merged_from(position, [columns for columns in group_columns if columns is not None])
            if merged is not None and len(group_columns) > 1 and None not in group_columns:
                if is_full:
                    self._cache_state(group[0], group[-1].start_ns, merged)
                yield group[-1], group[-1].start_ns, merged
                continue
            for chunk, columns in zip(group, group_columns, strict=True):
                yield chunk, chunk.start_ns, None if columns is None else self._checkpoint(chunk, columns)

    def _checkpoint_columns(self, file: BinaryIO, chunk: Chunk) -> Columns | None:
        for index, raw in self._raw_messages(file, chunk, self.channels((CHECKPOINTS,))):
            try:
                self._check_time(chunk, raw.log_time_ns)
                return Columns(self._columns_data(chunk, index, raw))
            except ProtocolError:
                self._record_bad_message(chunk, index)
        return None

    def _checkpoint(self, chunk: Chunk, columns: Columns) -> DeltaCheckpoint | None:
        try:
            (checkpoint,) = columns.records(DeltaCheckpoint)
            check_delta_checkpoint(checkpoint)
        except (ProtocolError, ValueError):
            self._record_bad_message(chunk, 0)
            return None
        return checkpoint

    def _columns_data(self, chunk: Chunk, index: int, raw: RawMessage) -> bytes:
        """Return the data of a columnar message. Raises ProtocolError if the uncompressed sizes that the file's
        columnar messages claim exceed the limit together.
        """
        key = chunk.offset, index
        if key not in self._claimed_bytes:
            claimed = claimed_bytes(raw.data)
            if self._num_claimed_bytes + claimed > self._survey.max_inflated:
                raise ProtocolError(f"columns that claim more than {self._survey.max_inflated >> 20} MiB together")
            self._claimed_bytes[key] = claimed
            self._num_claimed_bytes += claimed
        return raw.data

    def _raw_messages(
        self, file: BinaryIO, chunk: Chunk, channels: Collection[int]
    ) -> Iterator[tuple[int, RawMessage]]:
        """Yield (index in the chunk, message) for the messages of `channels`; none if the chunk is damaged."""
        if chunk.damage or not chunk.counts.keys() & channels:
            return
        try:
            messages = read_chunk(file, chunk, self._decompressor)
        except DamagedChunk:
            self._survey.damages.append(chunk.damage_text)
            return
        for index, message in enumerate(messages):
            if message.channel in channels:
                yield index, message

    @staticmethod
    def _check_time(chunk: Chunk, log_time_ns: int) -> None:
        if not chunk.start_ns <= log_time_ns <= chunk.end_ns:
            raise ProtocolError("a message of another time than its chunk")

    def _record_bad_message(self, chunk: Chunk, index: int) -> None:
        if len(self._bad_messages) < MAX_BAD_MESSAGES:
            self._bad_messages.add((chunk.offset, index))


def _merged_from(position: StatePosition, parts: Sequence[Columns]) -> DeltaCheckpoint | None:
    """Merge delta checkpoints into one. Returns None if they do not continue from `position` and from one another, or
    cannot be merged.
    """
    seq, continuing = position.seq, list[Columns]()
    try:
        for part in parts:
            if part.num_records != 1:
                return None
            since_seq, next_seq, epoch = (part.number(name) for name in ("since_seq", "seq", "epoch"))
            if not continuing and epoch == position.epoch and next_seq <= seq:
                continue  # already contained in the keyframe
            if since_seq != seq or epoch != position.epoch:
                return None
            continuing.append(part)
            seq = next_seq
        if not continuing:
            return None
        merged = joined_checkpoints(continuing)
        check_delta_checkpoint(merged)
    except ProtocolError:
        return None
    return merged


def _state_bytes(state: TelemetryMessage) -> int:
    assert isinstance(state, Snapshot | DeltaCheckpoint), "others are not kept"
    infos = state.requests_info if isinstance(state, Snapshot) else state.new_requests
    num_bytes = ROW_BYTES * len(state.blocks.state) + len(state.blocks.parent)  # one byte per row
    return (
        num_bytes + ROW_BYTES * len(state.requests.state) + len(state.requests.table_blocks) + INFO_BYTES * len(infos)
    )
