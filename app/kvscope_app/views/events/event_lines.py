"""Events as tab-separated lines for the clipboard and as CSV or TSV files. Imports no widget."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.views.events.event_entries import why_text
from kvscope_telemetry import operating_system
from kvscope_telemetry.messages.event_kinds import kind_text
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.summaries.summary import TimedEvent
from kvscope_telemetry.whole_file import require_regular

COLUMNS: Final = ("time", "time_ns", "event", "request", "caused_by", "blocks", "tokens", "why")
_EVENTS_PER_TURN: Final = 1_000


def to_lines(rows: Iterable[tuple[int, Event]], delimiter: str = "\t", *, with_head: bool = True) -> str:
    """Return one line per (ns since 1970, event). Each line has the local time with its UTC offset, and the
    time in ns.
    """
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    if with_head:
        writer.writerow(COLUMNS)
    writer.writerows(_row(time_ns, event) for time_ns, event in rows)
    return text.getvalue()


class EventExport(QObject):
    """Writes events to a file, some per pass of the event loop. Deletes itself at the end.

    An existing file is replaced only after all events have been written.
    """

    done = Signal(str)
    """Emitted when the export ends, with the result as text: the number of events, or the error."""

    def __init__(self, path: str, events: list[TimedEvent], parent: QObject) -> None:
        super().__init__(parent)
        self._path, self._events, self._num_written = Path(path), events, 0
        self._part = self._path.with_name(self._path.name + ".part")
        self._delimiter = "\t" if self._path.suffix.lower() == ".tsv" else ","
        self._text = to_lines((), self._delimiter)
        self._timer = QTimer(self, interval=0)
        self._timer.timeout.connect(self._write_portion)
        self._timer.start()

    def _write_portion(self) -> None:
        events = self._events[self._num_written : self._num_written + _EVENTS_PER_TURN]
        self._text += to_lines(((e.time_ns, e.event) for e in events), self._delimiter, with_head=False)
        try:
            require_regular(self._path)
            with self._part.open("a" if self._num_written else "w", encoding="utf-8", newline="") as file:
                file.write(self._text)
            self._text = ""
            self._num_written += len(events)
            if self._num_written < len(self._events):
                return
            operating_system.rename(self._part, self._path)
        except OSError as error:
            self._finish(f"not written: {error.strerror}")
            return
        self._finish(f"{self._num_written} written to {self._path.name}")

    def _finish(self, result: str) -> None:
        self._timer.stop()
        self.done.emit(result)
        self.deleteLater()


def _row(time_ns: int, event: Event) -> tuple[str | int, ...]:
    local_time = datetime.fromtimestamp(time_ns // 1_000_000_000).astimezone()
    time_text = (
        local_time.strftime("%Y-%m-%dT%H:%M:%S") + f".{time_ns // 1000 % 1_000_000:06d}" + local_time.strftime("%z")
    )
    numbers = (event.number or "", event.other or "", event.num_blocks, event.num_tokens)
    return time_text, time_ns, kind_text(event.kind), *numbers, why_text(event)
