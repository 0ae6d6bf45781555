"""Finds the chunks of a recording that is being opened, their time ranges, and the engines that were recorded.

Decides how damaged, hostile or oversized files are handled: as much as can be trusted within the read budget is opened,
and what is skipped is reported. No file stays open between calls.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import BinaryIO

from kvscope_telemetry.errors import BadInput, ProtocolError
from kvscope_telemetry.messages.telemetry import Frame, Hello, Snapshot
from kvscope_telemetry.messages.validity import check_hello
from kvscope_telemetry.messages.wire import decode_telemetry, tag_of
from kvscope_telemetry.recordings.chunk_walk import ChunkList, ChunkWalk, OtherFormat
from kvscope_telemetry.recordings.chunks import MAGIC, MAX_LOG_TIME_NS, Chunk, DamagedChunk, RawMessage, read_chunk
from kvscope_telemetry.recordings.columns import Columns, claimed_bytes
from kvscope_telemetry.recordings.frame_batch import FrameBatch
from kvscope_telemetry.recordings.layout import FORMAT_VERSION, FRAMES, HELLOS, KEYFRAMES, MESSAGES, SNAPSHOTS, TOPICS
from kvscope_telemetry.recordings.read_budget import RECORD_BYTES, ProgressCallback, ReadBudget, ReadBudgetSpent
from kvscope_telemetry.recordings.regular_file import FollowedFile, stored_bytes


@dataclass(slots=True)
class Survey:
    chunks: list[Chunk] = field(default_factory=list)
    """Chunks with messages, sorted by time."""
    channels: dict[int, int] = field(default_factory=dict)
    hellos: list[Hello] = field(default_factory=list)
    is_complete: bool = False
    limit: str = ""
    """Reason why only a part of the file was scanned; "" if all of it was."""
    max_inflated: int = 0
    """Limit on the total uncompressed bytes that all columnar messages may claim."""
    damages: list[str] = field(default_factory=list)
    """One text for each skipped chunk or byte range, with its position and the reason."""

    def add(self, new: list[Chunk]) -> None:
        in_order = not (self.chunks and new) or self.chunks[-1].start_ns <= new[0].start_ns
        self.chunks += new
        if not in_order:
            self.chunks.sort(key=lambda chunk: chunk.start_ns)


def survey(followed: FollowedFile, surveyor: Surveyor, watch: ProgressCallback | None = None) -> list[Chunk]:
    """Return the chunks of a file that `surveyor` has not seen yet.

    Raises:
        BadInput: The file is not a readable recording; the message is one line.
        OpeningCancelled: `watch` returned False.
    """
    try:
        with followed.open() as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise BadInput(f"{str(followed.path)!r} is not a recording: it does not start like an MCAP file")
            followed.remember_size(file)
            return surveyor.run(file, ReadBudget(stored_bytes(file), watch))
    except OtherFormat as other:
        raise BadInput(
            f"recording {str(followed.path)!r} has format {other}, this version reads format {FORMAT_VERSION}: "
            "open it with the version that recorded it, or record it again"
        ) from None
    except OSError as error:
        raise BadInput(f"recording {str(followed.path)!r} cannot be read: {error.strerror}") from None


class Surveyor:
    def __init__(self) -> None:
        self.found = Survey()
        self._walk = ChunkWalk(len(MAGIC))
        self._num_walked = self._num_damages = 0
        self._file: BinaryIO
        self._budget: ReadBudget

    def run(self, file: BinaryIO, budget: ReadBudget) -> list[Chunk]:
        """Return the undamaged chunks that were found since the last call, sorted by time. The chunks are also
        added to `found`.
        """
        self._file, self._budget = file, budget
        found, walked = self.found, self._walk.found
        budget.begin_step(0.0, 0.5)
        self._walk.run(file, budget)
        found.max_inflated = budget.max_inflated
        found.is_complete, found.limit = walked.is_complete, walked.limit
        found.damages += walked.damages[self._num_damages :]
        self._num_damages = len(walked.damages)
        channels = walked.topics
        found.channels = {kind: channels[topic] for kind, topic in TOPICS.items()}
        budget.begin_step(0.5, 0.9)
        new = self._plausible_chunks(walked)
        self._num_walked = len(walked.chunks)
        budget.begin_step(0.9, 1.0)
        try:
            self._find_hellos(new)
        except ReadBudgetSpent as spent:
            found.limit = found.limit or str(spent)
        found.add(new)
        return new

    def _plausible_chunks(self, walked: ChunkList) -> list[Chunk]:
        """Return the chunks with valid times and counts, sorted by time. Where the stored times or counts are
        doubtful, they are determined by reading the chunk's messages.
        """
        plausible: list[Chunk] = []
        new = walked.chunks[self._num_walked :]
        last = new[-1] if new and not walked.is_complete else None
        for index, chunk in enumerate(new):
            self._budget.set_progress(index / len(new))
            # A truncated file may end within the indexes of its last chunk.
            if not (chunk.is_doubtful or self._has_unknown_count(chunk) or chunk is last):
                chunk.extend_to_frames()
            else:
                try:
                    self._correct_chunk(chunk)
                except ReadBudgetSpent as spent:
                    self.found.limit = self.found.limit or str(spent)
                    break
            if chunk.damage:
                self.found.damages.append(chunk.damage_text)
            elif chunk.counts:
                plausible.append(chunk)
        return sorted(plausible, key=lambda chunk: chunk.start_ns)

    def _has_unknown_count(self, chunk: Chunk) -> bool:
        return chunk.num_frames is None and self.found.channels[FRAMES] in chunk.counts

    def _correct_chunk(self, chunk: Chunk) -> None:
        try:
            messages = self._read(chunk)
        except DamagedChunk:
            return
        times = [message.log_time_ns for message in messages]
        chunk.num_frames = 0
        for message in messages:
            if message.channel == self.found.channels[MESSAGES]:
                chunk.num_frames += tag_of(message.data) == Frame.__name__
            elif message.channel == self.found.channels[FRAMES]:
                with contextlib.suppress(ProtocolError):  # counted when the message is read
                    self._budget.spend(claimed_bytes(message.data))
                    batch = FrameBatch(message.data)
                    chunk.num_frames += batch.num_frames
                    times += [int(batch.log_times.min()), int(batch.log_times.max())]
        if times and max(times) >= MAX_LOG_TIME_NS:
            chunk.damage = "its messages are of after the year 2116"
        elif times:
            chunk.start_ns, chunk.end_ns = min(times), max(times)

    def _find_hellos(self, new: list[Chunk]) -> None:
        """Collect the hellos of all epochs. Keyframes are only read if there are no other hellos."""
        for kinds in ((HELLOS, SNAPSHOTS), (KEYFRAMES,)):
            channels = {self.found.channels[kind]: kind for kind in kinds}
            candidates = [chunk for chunk in new if channels.keys() & chunk.counts.keys()]
            for index, chunk in enumerate(candidates):
                self._budget.set_progress(index / len(candidates))
                try:
                    messages = self._read(chunk)
                except DamagedChunk:
                    self.found.damages.append(chunk.damage_text)
                    new.remove(chunk)
                    continue
                for message in messages:
                    if message.channel in channels:
                        self._find_hello(channels[message.channel], message.data)
            if self.found.hellos:
                return

    def _find_hello(self, kind: int, data: bytes) -> None:
        try:
            if kind in (SNAPSHOTS, KEYFRAMES):
                self._budget.spend(claimed_bytes(data))
                (hello,) = Columns(data).objects(Snapshot, "hello")
                check_hello(hello)
                self.found.hellos.append(hello)
                return
            message = decode_telemetry(data)
        except (ProtocolError, ValueError):  # counted when the message is read
            return
        if isinstance(message, Hello | Snapshot):
            self.found.hellos.append(message if isinstance(message, Hello) else message.hello)

    def _read(self, chunk: Chunk) -> list[RawMessage]:
        self._budget.spend(0 if chunk.damage else chunk.inflated_bytes)
        messages = read_chunk(self._file, chunk)
        self._budget.spend(2 * RECORD_BYTES * len(messages))
        return messages
