"""The files that chunks are taken from, opened one after another."""

from __future__ import annotations

from typing import BinaryIO, Self

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.bundles.hash_lists import HashPart, decode_part
from kvscope_telemetry.recordings.chunks import DamagedChunk
from kvscope_telemetry.recordings.copying.stored_records import StoredRecords
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.timeline.saving.pieces import NotAsWritten, Piece


class Opened:
    """The file of the last piece stays open until another's is asked for, or the block is left."""

    def __init__(self) -> None:
        self._recording: Recording | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def records(self, piece: Piece) -> StoredRecords:
        """A chunk as it lies. Raises NotAsWritten for one that is damaged, or of a file that is gone."""
        if piece.recording is not self._recording or self._file is None:
            self._close()
            try:
                self._file = piece.recording.chunks.file.open()
            except BadInput as error:
                raise NotAsWritten(str(error)) from None
            self._recording = piece.recording
        try:
            return piece.recording.chunks.records(self._file, piece.chunk)
        except DamagedChunk as damage:
            raise NotAsWritten(str(damage)) from None

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._recording = self._file = None


def hash_part_in(stored: StoredRecords) -> HashPart:
    """The part of a list that a chunk is. Raises NotAsWritten."""
    part = decode_part(stored.messages[0].data)
    if part is None:
        raise NotAsWritten("a part of its hashes cannot be read")
    return part
