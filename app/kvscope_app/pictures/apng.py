"""Animated PNG (third edition of the PNG specification, chunks acTL, fcTL and fdAT), written a frame at a time.

A frame is the smallest rectangle that holds what changed since the one before; nothing but two frames is kept. A frame
in which nothing changed makes the one before it last longer. Knows no Qt.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_RGB: Final = 2
_LEVEL: Final = 6
_UP: Final = 2
"""The filter that takes from each byte the one above it: views are made of runs and columns."""
_MOST_MS: Final = 65_535
_Rgb = npt.NDArray[np.uint8]


def write_apng(frames: Iterator[_Rgb], num_frames: int, frame_ms: int, width: int, height: int, file: BinaryIO) -> None:
    """Write `frames`, shape (height, width, 3) each, of which `num_frames` come, to a file that can be sought in."""
    writer = _Writer(file, frame_ms, width, height)
    for frame in frames:
        writer.add(frame)
    writer.close()
    assert writer.num_shown == num_frames, f"{num_frames} frames were announced, {writer.num_shown} came"


class _Writer:
    def __init__(self, file: BinaryIO, frame_ms: int, width: int, height: int) -> None:
        self._file = file
        self._frame_ms = frame_ms
        self._before: _Rgb | None = None
        self._sequence = 0
        self._num_written = 0
        self._waiting: tuple[int, int, _Rgb] | None = None
        """Column, row and pixels of the part that is written when it is known how long it lasts."""
        self._waiting_ms = 0
        self.num_shown = 0
        file.write(_SIGNATURE)
        _chunk(file, b"IHDR", struct.pack(">IIBBBBB", width, height, 8, _RGB, 0, 0, 0))
        self._control_at = file.tell()
        _chunk(file, b"acTL", struct.pack(">II", 1, 0))

    def add(self, frame: _Rgb) -> None:
        """The next."""
        self.num_shown += 1
        part = (0, 0, frame) if self._before is None else _changed(self._before, frame)
        if part is None and self._waiting_ms + self._frame_ms <= _MOST_MS:
            self._waiting_ms += self._frame_ms
            return
        self._flush()
        self._waiting = part or (0, 0, frame[:1, :1])
        self._waiting_ms = self._frame_ms
        self._before = frame

    def close(self) -> None:
        """The last is in: now it is known how many there are."""
        self._flush()
        _chunk(self._file, b"IEND", b"")
        self._file.seek(self._control_at)
        _chunk(self._file, b"acTL", struct.pack(">II", self._num_written, 0))
        self._file.seek(0, 2)

    def _flush(self) -> None:
        if self._waiting is None:
            return
        left, top, part = self._waiting
        height, width = part.shape[:2]
        place = (self._take_sequence(), width, height, left, top, self._waiting_ms, 1000, 0, 0)
        _chunk(self._file, b"fcTL", struct.pack(">IIIIIHHBB", *place))
        data = zlib.compress(_filtered(part), _LEVEL)
        if self._num_written == 0:
            _chunk(self._file, b"IDAT", data)
        else:
            _chunk(self._file, b"fdAT", struct.pack(">I", self._take_sequence()) + data)
        self._num_written += 1

    def _take_sequence(self) -> int:
        self._sequence += 1
        return self._sequence - 1


def _changed(before: _Rgb, now: _Rgb) -> tuple[int, int, _Rgb] | None:
    """The smallest rectangle in which they differ: its left column, top row and pixels; None where they are equal."""
    differs = (before != now).any(axis=2)
    rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0))
    if not rows.size:
        return None
    top, left = int(rows[0]), int(columns[0])
    return left, top, now[top : rows[-1] + 1, left : columns[-1] + 1]


def _filtered(part: _Rgb) -> bytes:
    """The lines as a PNG has them, each after the number of its filter."""
    height, width = part.shape[:2]
    flat = np.ascontiguousarray(part).reshape(height, width * 3)
    lines = np.empty((height, 1 + width * 3), np.uint8)
    lines[:, 0] = _UP
    lines[0, 1:] = flat[0]
    lines[1:, 1:] = flat[1:] - flat[:-1]  # modulo 256, as the filter is
    return lines.tobytes()


def _chunk(file: BinaryIO, name: bytes, data: bytes) -> None:
    file.write(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)))
