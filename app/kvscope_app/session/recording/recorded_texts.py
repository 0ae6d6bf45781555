"""Block texts of a recording: read on a separate thread, then looked up in memory. Imports no Qt.

Owns a separate `Recording` object, for use on that thread, and the index of texts. Lookups run one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvscope_app.session.background import Background
from kvscope_app.session.links import Player
from kvscope_app.session.recording.disk_history import DiskHistory
from kvscope_telemetry.block_texts.block_texts import BlockTextLookup, RecordedText, TextIndex
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording

_REPORT_INTERVAL: Final = 512
"""Number of texts read between two calls of the progress callback."""
_HALF: Final = 0.5
"""Progress reported while texts are read: their number is not known in advance."""


def recorded_texts(player: Player | None, disk_history: DiskHistory | None) -> RecordedTexts | None:
    """Return the texts of a played recording or of a live session's history; None if there cannot be any."""
    if player is not None:
        recording = player.recording
        if recording.has_texts or recording.may_grow:
            return RecordedTexts(lambda _: recording.reopened())
        return None
    return None if disk_history is None else RecordedTexts(disk_history.open_recording)


class RecordedTexts:
    """Texts of a recording. The first lookup calls `open_recording`, which opens the recording only for this object."""

    def __init__(self, open_recording: Callable[[ProgressCallback], Recording]) -> None:
        self._open = open_recording
        self._lock = threading.Lock()
        self._recording: Recording | None = None
        self._index = TextIndex()
        self._newest_ns = -1
        self._is_closed = threading.Event()

    @property
    def has_any(self) -> bool | None:
        """Whether the recording has any text; None before the first lookup."""
        return None if self._recording is None else self._newest_ns >= 0

    @property
    def may_grow(self) -> bool:
        """Whether texts that are missing now may appear later."""
        return self._recording is None or self._recording.may_grow

    def look_up(self, lookups: Sequence[BlockTextLookup], at_ns: int) -> Background[list[BlockContent | None]]:
        """Look up the content of each block at `at_ns` on a thread, in the given order; None where it was not
        recorded.
        """

        def work(watch: ProgressCallback) -> list[BlockContent | None]:
            with self._lock:
                self._read(lambda share: watch(share) and not self._is_closed.is_set())
                return [self._index.find(each, at_ns) for each in lookups]

        return Background(work, "kvscope-texts")

    def search(self, text: str, limit: int) -> Background[list[RecordedText]]:
        """Search on a thread for the first `limit` texts that contain `text`."""

        def work(watch: ProgressCallback) -> list[RecordedText]:
            with self._lock:
                self._read(lambda share: watch(share) and not self._is_closed.is_set())
                return self._index.search(text, limit)

        return Background(work, "kvscope-texts")

    def close(self) -> None:
        """Cancel lookups in progress on other threads, without waiting for them. The files of the recording are open
        only while they are read.
        """
        self._is_closed.set()

    def _read(self, watch: ProgressCallback) -> None:
        """Open the recording at the first call, and add the texts that were written since the last call to the index.

        Raises OpeningCancelled if `watch` returns False.
        """
        if self._recording is None:
            self._recording = self._open(watch)
        elif not self._recording.grow():
            return
        new_texts: list[RecordedText] = []
        for count, text in enumerate(self._recording.texts(self._newest_ns + 1)):
            if count % _REPORT_INTERVAL == 0 and not watch(_HALF):
                raise OpeningCancelled
            if text.time_ns > self._newest_ns:  # `texts` also yields the rest of the chunk that contains this time
                new_texts.append(text)
        self._newest_ns = max(self._newest_ns, self._index.extend(new_texts))
