"""A part of what was recorded into a file of its own, its chunks as they lie.

It begins with the whole state and a leap to the first chunk that is taken; the frames between are told anew, and those
behind the last. Before the chunks lies, as one part, what their list of hashes told up to there. Keyframes that files
of a ring begin with are left out as long as leaps go on without them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

from kvscope_telemetry.errors import ProtocolError, UnknownMessage
from kvscope_telemetry.messages.telemetry import Snapshot, TelemetryMessage
from kvscope_telemetry.messages.wire import decode_telemetry, encode
from kvscope_telemetry.recorded import Recorded, StoredMessage
from kvscope_telemetry.recordings.annotations import Annotations, Entry, glance_entries
from kvscope_telemetry.recordings.bundles.hash_lists import HashPart, encode_part, joined_part
from kvscope_telemetry.recordings.effort import Watch
from kvscope_telemetry.recordings.keyframes import snapshot_of, state_of
from kvscope_telemetry.recordings.layout import (
    BOOKMARKS,
    FRAMES,
    HASHES,
    KEYFRAMES,
    LEAPS,
    OTHERS,
    STATE,
    SUMMARIES,
    TEXTS,
)
from kvscope_telemetry.recordings.mcap_file import McapFile
from kvscope_telemetry.recordings.overview import computed_part
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.summaries.bookmark import encode_bookmark
from kvscope_telemetry.summaries.summary import SECOND_NS, TimedEvent
from kvscope_telemetry.texts.block_texts import MAX_TEXT_BYTES, encode_text
from kvscope_telemetry.timeline.saving.besides import bookmarks_of, texts_of
from kvscope_telemetry.timeline.saving.chain import Chain, Keyframe
from kvscope_telemetry.timeline.saving.opened import Opened, hash_part_in
from kvscope_telemetry.timeline.saving.pieces import NotAsWritten, Piece, messages_of, parts_of
from kvscope_telemetry.timeline.saving.seconds import Seconds, summarized_until

_LOOK_EVERY: Final = 16


class ChunkCopy:
    """Of what `recorded` has from `from_ns` to `until_ns` (both included). Raises NotAsWritten where nothing, or not
    all of it, can be taken so."""

    def __init__(self, recorded: Recorded, from_ns: int, until_ns: int, watch: Watch) -> None:
        self._recorded, self._watch = recorded, watch
        self._from_ns, self._until_ns = from_ns, until_ns
        self._parts = parts_of(recorded, from_ns, until_ns)
        self._anew_until_ns = (self._parts.boundary_ns // SECOND_NS + 1) * SECOND_NS
        self._files = Opened()
        with self._files:
            self._anew_from_ns = self._last_second()
        if self._anew_from_ns <= self._anew_until_ns:
            raise NotAsWritten("no whole second lies in it")

    def write(self, file: McapFile) -> bool:
        """All of it; False as soon as the watch ends it. Raises NotAsWritten for a damaged chunk, and OSError."""
        with self._files:
            return self._write(file)

    def _write(self, file: McapFile) -> bool:
        notes, chain = self._begin(file)
        self._write_list_before(file, chain)
        events = [item for item in notes.new if isinstance(item, TimedEvent)]
        file.add_together(notes.glance(at_end=True))
        late = computed_part(self._recorded, self._anew_from_ns, until_ns=self._until_ns)
        seconds = Seconds(self._from_ns, self._anew_until_ns, self._anew_from_ns, [*events, *late.events])
        middle = self._parts.middle
        for count, piece in enumerate(middle):
            if count % _LOOK_EVERY == 0 and not self._watch(count / len(middle)):
                return False
            self._copy(piece, file, chain, seconds)
        behind = self._parts.pieces[self._parts.end :]
        for count, stored in enumerate(messages_of(behind, self._from_ns, self._until_ns)):
            if count % _LOOK_EVERY == 0 and not self._watch(1.0):
                return False
            file.add(stored.kind, stored.log_time_ns, stored.data)
        for piece in behind:
            if piece.kind == SUMMARIES and not seconds.are_over:
                file.add_together(seconds.rest(self._files.records(piece)))
        file.add_together(glance_entries([*late.summaries, *late.events]))
        self._write_besides(file)
        return self._watch(1.0)

    def _last_second(self) -> int:
        """From when on seconds are summarized anew."""
        parts = self._parts
        known_ns = summarized_until(parts.pieces[parts.first :], self._files)
        if parts.end == len(parts.pieces):
            return known_ns
        ends = [piece.chunk.end_ns for piece in parts.middle if piece.kind == FRAMES]
        return min(known_ns, max(ends, default=0) // SECOND_NS * SECOND_NS)

    def _begin(self, file: McapFile) -> tuple[Annotations, Chain]:
        """With the state, and what came until the first chunk that is taken; notes of all until a second is whole."""
        notes = Annotations()
        self._write_state(file, notes)
        self._tell_until_boundary(file, notes)
        at = notes.follower.mirror
        assert at.epoch is not None, "there is a state"
        chain = Chain((at.epoch, at.seq), self._from_ns)
        for stored, told in _read(messages_of(self._pieces_until_second(), 0, self._anew_until_ns - 1)):
            notes.add(told, stored.log_time_ns)
        return notes, chain

    def _write_state(self, file: McapFile, notes: Annotations) -> None:
        from_s = (self._from_ns - self._recorded.start_ns) / 1e9
        mirror = self._recorded.state_at(from_s)
        if mirror.hello is None:
            raise NotAsWritten("it begins without a state")
        file.add(STATE, self._from_ns, encode(mirror.hello))
        notes.add(mirror.hello, self._from_ns)
        memory = self._recorded.memory_before(from_s, mirror.hello.epoch)
        if memory is not None:
            file.add(OTHERS, self._from_ns, encode(memory))
            notes.add(memory, self._from_ns)
        file.add(STATE, self._from_ns, state_of(mirror))
        notes.add(snapshot_of(mirror), self._from_ns)

    def _tell_until_boundary(self, file: McapFile, notes: Annotations) -> None:
        """As they came, not in bundles: these would tell hashes."""
        parts, entries = self._parts, list[Entry]()
        for stored, told in _read(messages_of(parts.pieces[: parts.first], self._from_ns + 1, self._until_ns)):
            entries.append((stored.kind, stored.log_time_ns, stored.data))
            made = notes.add(told, stored.log_time_ns)
            if made is not None:
                file.add_together(entries)
                file.add(*made)
                entries.clear()
        file.add_together(entries)
        leap = notes.last_leap(parts.boundary_ns)
        if leap is not None:
            file.add(*leap)

    def _pieces_until_second(self) -> list[Piece]:
        middle = self._parts.pieces[self._parts.first + 1 :]
        return [piece for piece in middle if piece.chunk.start_ns < self._anew_until_ns]

    def _write_list_before(self, file: McapFile, chain: Chain) -> None:
        """What the chunks that are taken refer to."""
        parts = self._parts
        first = parts.pieces[parts.first]
        told: list[HashPart] = []
        if first.kind == LEAPS:
            for part in self._hash_parts(reversed(parts.pieces[: parts.first]), first):
                if told and part.list != told[0].list:
                    break
                told.append(part)
        following = next(self._hash_parts(parts.pieces[parts.first + 1 :], first), None)
        if not told or (following is not None and following.list != told[0].list):
            return
        whole = joined_part(told)
        if whole is None:
            raise NotAsWritten("hashes it needs are missing")
        file.add_together([(HASHES, max(self._from_ns, whole.list), encode_part(whole))])
        chain.has(whole)

    def _hash_parts(self, pieces: Iterable[Piece], first: Piece) -> Iterator[HashPart]:
        """Of the file of `first`, up to a keyframe: with it lists begin anew."""
        for piece in pieces:
            if piece.recording is not first.recording or piece.kind == KEYFRAMES:
                return
            if piece.kind == HASHES:
                yield hash_part_in(self._files.records(piece))

    def _copy(self, piece: Piece, file: McapFile, chain: Chain, seconds: Seconds) -> None:
        if piece.is_head or not piece.kind:
            return
        stored = self._files.records(piece)
        if piece.kind == SUMMARIES:
            anew = seconds.take(stored)
            if anew is not None:
                file.add_together(anew)
                return
        elif piece.kind == KEYFRAMES:
            becomes = chain.about(stored, begins_file=piece.begins_file)
            if becomes is Keyframe.TOLD_ANEW:
                file.refer_to(chain.lists)
                self._tell_anew(piece, file)
            if becomes is not Keyframe.TAKEN:
                return
        elif piece.kind == HASHES:
            chain.has(hash_part_in(stored))
        elif piece.kind == LEAPS:
            chain.leapt(stored)
        file.copy(stored)

    def _tell_anew(self, piece: Piece, file: McapFile) -> None:
        """A keyframe without references to what is not in the file."""
        told, mirror = piece.recording.chunks.first_of(piece.chunk), Mirror()
        if isinstance(told, Snapshot):
            with contextlib.suppress(ProtocolError):
                mirror.reset(told)
                file.add(KEYFRAMES, piece.chunk.start_ns, state_of(mirror))

    def _write_besides(self, file: McapFile) -> None:
        for bookmark in bookmarks_of(self._recorded, self._from_ns, self._until_ns):
            file.add_together([(BOOKMARKS, max(bookmark.time_ns, 0), encode_bookmark(bookmark))])
        for texts in texts_of(self._recorded, self._from_ns, self._until_ns):
            entries = [(TEXTS, text.time_ns, encode_text(text)) for text in texts]
            file.add_together([entry for entry in entries if len(entry[2]) <= MAX_TEXT_BYTES])


def _read(messages: Iterator[StoredMessage]) -> Iterator[tuple[StoredMessage, TelemetryMessage]]:
    """Those that can be read."""
    for stored in messages:
        with contextlib.suppress(UnknownMessage, ProtocolError):
            yield stored, decode_telemetry(stored.data)
