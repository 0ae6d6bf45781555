"""Which messages of a chunk go into bundles, and what of a bundle says how many frames it has and until when.

A bundle is two messages: at the time of its first frame the columns, and at that of its last frame the number of
frames. So an index of the file knows from when to when it is. In a chunk with bundles messages go by their log times,
and those of one time by their order in the file; a new bundle begins where that order would be another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final

import msgspec

from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage
from kvscope_telemetry.recordings.bundles.bundle import MAX_FRAMES, TimedFrame, bundled_frame, pack_bundle
from kvscope_telemetry.recordings.bundles.hash_lists import HashList
from kvscope_telemetry.recordings.layout import BUNDLES, FRAMES

Entry = tuple[int, int, bytes]
"""Channel, log time in ns, data."""
FEW: Final = 4
"""Fewer frames go into the file as they came."""
_MAX_END_BYTES: Final = 9
_NUMBER: Final = msgspec.msgpack.Decoder(int)


def with_bundles(
    entries: Sequence[Entry], into: HashList, read: Iterable[TelemetryMessage | None] = repeat(None)
) -> list[Entry]:
    """The messages of a chunk as they are written; hashes are told in `into`, of which a part is to be written before.
    `read`: what was read of each, where that is known."""
    gathering = _Gathering(into)
    for entry, message in zip(entries, read, strict=False):
        gathering.add(entry, message)
    gathering.end()
    return gathering.written


def num_frames_at_end(data: bytes) -> int | None:
    """How many frames the bundle has that ends with this message; None: it is no end."""
    if len(data) > _MAX_END_BYTES:
        return None
    try:
        return min(max(_NUMBER.decode(data), 0), MAX_FRAMES)
    except msgspec.DecodeError:
        return None


class _Gathering:
    def __init__(self, into: HashList) -> None:
        self._into = into
        self.written: list[Entry] = []
        self._timed: list[TimedFrame] = []
        self._others: list[Entry] = []
        """What came between them."""
        self._entries: list[Entry] = []
        """All of both."""

    def add(self, entry: Entry, read: TelemetryMessage | None) -> None:
        channel, log_time_ns, data = entry
        frame = bundled_frame(data, read) if channel == FRAMES else None
        if channel != FRAMES:
            self._others.append(entry)
        elif frame is None:  # as it came
            self.end()
            self.written.append(entry)
            return
        else:
            if self._ends_before(log_time_ns, frame):
                self.end()
            self._timed.append((log_time_ns, frame))
        self._entries.append(entry)

    def end(self) -> None:
        """End the bundle."""
        timed = self._timed
        bundle = _packed(timed, self._into) if len(timed) >= FEW else None
        if bundle is None:
            self.written += self._entries
        else:
            end = msgspec.msgpack.encode(len(timed))
            self.written += [(BUNDLES, timed[0][0], bundle), (BUNDLES, timed[-1][0], end)]
            self.written += self._others
        self._timed, self._others, self._entries = [], [], []

    def _ends_before(self, log_time_ns: int, frame: Frame) -> bool:
        if not self._timed:
            return bool(self._others)
        if self._others and self._others[-1][1] >= log_time_ns:
            return True
        last_ns, last = self._timed[-1]
        return log_time_ns < last_ns or frame.epoch != last.epoch or len(self._timed) >= MAX_FRAMES


def _packed(timed: Sequence[TimedFrame], into: HashList) -> bytes | None:
    """None where one of them contradicts itself."""
    try:
        return pack_bundle(timed, into)
    except (ValueError, OverflowError):
        return None
