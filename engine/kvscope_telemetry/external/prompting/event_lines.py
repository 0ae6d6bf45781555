"""Server-sent events out of the pieces in which they come, cut anywhere. Pure; bounded."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.errors import ProtocolError

MAX_EVENT_BYTES: Final = 1 << 20
_FIELD: Final = b"data:"


class EventLines:
    """Of one answer."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._num_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that is whole now. Raises ProtocolError for one without an end."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            self._take(line.removesuffix(b"\r"), events)
        if len(self._rest) + self._num_bytes > MAX_EVENT_BYTES:
            raise ProtocolError(f"one event of the answer has more than {MAX_EVENT_BYTES >> 20} MB: that is not read")
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(_FIELD):
            self._data.append(line[len(_FIELD) :].removeprefix(b" "))
            self._num_bytes += len(line)
        elif not line and self._data:
            events.append(b"\n".join(self._data))
            self._data.clear()
            self._num_bytes = 0
