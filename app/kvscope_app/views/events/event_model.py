"""Events, newest first: when, what, which request, and why. Owns the model, the filter and the words."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from enum import StrEnum
from html import escape
from typing import Any, Final

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt
from PySide6.QtGui import QColor

from kvscope_app.look.number_text import count, plural
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.session.event_log import EventLog, LoggedEvent
from kvscope_telemetry.messages.event_words import cause_text
from kvscope_telemetry.messages.telemetry import Event

Index = QModelIndex | QPersistentModelIndex
MAX_SHOWN: Final = 2_000
_HEADERS: Final = ("Time", "Event", "Request", "Why")
WHY: Final = 3
_COLORS: Final = {
    "admitted": "accent",
    "resumed": "accent",
    "finished": "good",
    "preempted": "bad",
    "refused": "bad",
    "aborted": "warn",
    "evicted": "muted",
    "note": "muted",
}


class EventFilter(StrEnum):
    """Which events a person wants to see."""

    ALL = "All events"
    REQUESTS = "Without evictions"
    PREEMPTIONS = "Preemptions"
    FAILURES = "Refused and aborted"


_KINDS: Final[dict[EventFilter, tuple[str, ...]]] = {
    EventFilter.ALL: tuple(_COLORS),
    EventFilter.REQUESTS: tuple(kind for kind in _COLORS if kind not in ("evicted", "note")),
    EventFilter.PREEMPTIONS: ("preempted", "resumed"),
    EventFilter.FAILURES: ("refused", "aborted"),
}


class EventModel(QAbstractTableModel):
    """The newest `MAX_SHOWN` events of a log, or of one request in it."""

    def __init__(self, wall_offset_ns: int, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self._wall_offset_ns = wall_offset_ns
        self._entries: list[LoggedEvent] = []
        self._filter = EventFilter.ALL
        self._serial = 0
        self._num_clears = 0

    def follow(self, log: EventLog) -> None:
        """Add what the log got since the last call."""
        if log.num_clears != self._num_clears:
            self._num_clears, self._serial = log.num_clears, 0
            self.show_entries([])
        fresh = [entry for entry in log.since(self._serial, MAX_SHOWN) if self._is_wanted(entry)]
        self._serial = log.last_serial
        self._prepend(fresh)

    def show_only(self, wanted: EventFilter, log: EventLog) -> None:
        """Show one kind of events."""
        self._filter = wanted
        self.show_entries(log.of_kinds(_KINDS[wanted], MAX_SHOWN))
        self._serial = log.last_serial

    def show_entries(self, entries: Sequence[LoggedEvent]) -> None:
        """Show `entries`, oldest first, instead of what is shown."""
        newest_first = list(reversed(entries))[:MAX_SHOWN]
        if newest_first == self._entries:
            return
        self.beginResetModel()
        self._entries = newest_first
        self.endResetModel()

    def entry_at(self, row: int) -> LoggedEvent | None:
        """The event in a row."""
        return self._entries[row] if 0 <= row < len(self._entries) else None

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._entries)

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(_HEADERS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = 0) -> Any:
        if orientation is not Qt.Orientation.Horizontal or not 0 <= section < len(_HEADERS):
            return None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        return _HEADERS[section] if role == Qt.ItemDataRole.DisplayRole else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        entry = self.entry_at(index.row())
        if entry is None:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(entry, index.column())
        if role == Qt.ItemDataRole.ToolTipRole and index.column() == WHY:
            return f"<p>{escape(why_text(entry.event))}</p>"  # as rich text, which is wrapped
        if role == Qt.ItemDataRole.ForegroundRole:
            if index.column() == 0:
                return self.theme.color("muted")
            return self.kind_color(entry) if index.column() == 1 else None
        return None

    def kind_color(self, entry: LoggedEvent) -> QColor:
        """Of the word for what happened."""
        return self.theme.color(_COLORS.get(entry.event.kind, "text"))

    def head(self, entry: LoggedEvent) -> tuple[str, str, str]:
        """Time, what happened, and to which request: the columns before the reason."""
        return self._text(entry, 0), self._text(entry, 1), self._text(entry, 2)

    def _text(self, entry: LoggedEvent, column: int) -> str:
        if column == 0:
            return clock_text(entry.time_ns + self._wall_offset_ns)
        if column == 1:
            return entry.event.kind
        if column == 2:
            return f"#{count(entry.event.number)}" if entry.event.number else ""
        return why_text(entry.event)

    def _is_wanted(self, entry: LoggedEvent) -> bool:
        return entry.event.kind in _KINDS[self._filter]

    def _prepend(self, fresh: list[LoggedEvent]) -> None:
        if not fresh:
            return
        self.beginInsertRows(QModelIndex(), 0, len(fresh) - 1)
        self._entries[:0] = reversed(fresh)
        self.endInsertRows()
        if len(self._entries) > MAX_SHOWN:
            self.beginRemoveRows(QModelIndex(), MAX_SHOWN, len(self._entries) - 1)
            del self._entries[MAX_SHOWN:]
            self.endRemoveRows()


def clock_text(wall_ns: int) -> str:
    """`14:03:20.125`, local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(wall_ns // 1_000_000_000)) + f".{wall_ns // 1_000_000 % 1000:03d}"


def why_text(event: Event) -> str:
    """The cause in one line, and what it moved as far as the cause does not say so itself."""
    cause = cause_text(event)
    said = set(re.findall(r"\d+", cause))
    parts = [cause] if cause else []
    if event.other and str(event.other) not in said:
        parts.append(f"for request #{event.other}")
    for number, noun in ((event.num_blocks, "block"), (event.num_tokens, "token")):
        if number and str(number) not in said:
            parts.append(plural(number, noun))
    return " · ".join(parts)
