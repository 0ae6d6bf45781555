"""Base class for models of event tables: columns and cell texts. Subclasses own the events."""

from __future__ import annotations

import re
from abc import abstractmethod
from html import escape
from typing import Any, ClassVar, Final

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QColor

from kvscope_app.session.event_log import LoggedEvent
from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.number_text import count, plural
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.views.table import Index, TableHead, TableModel
from kvscope_telemetry.messages.event_kinds import BY_NAME, cause_text, kind_text
from kvscope_telemetry.messages.telemetry import Event

HEADERS: Final = ("Time", "Event", "Request", "Why")
WHY: Final = 3


class EventEntries(TableModel):
    """Table model of events. The time of an event plus `wall_offset_ns` is its time in ns since 1970."""

    table_head: ClassVar[TableHead] = TableHead(HEADERS)

    def __init__(self, wall_offset_ns: int, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self._wall_offset_ns = wall_offset_ns
        self.cursor_ns: int | None = None
        """Position of the session's cursor in ns since 1970, or None at the end. Later events are muted."""

    @abstractmethod
    def entry_at(self, row: int) -> LoggedEvent | None: ...

    def wall_ns(self, entry: LoggedEvent) -> int:
        return entry.time_ns + self._wall_offset_ns

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        entry = self.entry_at(index.row())
        if entry is None:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(entry, index.column())
        if role == Qt.ItemDataRole.ToolTipRole and index.column() == WHY:
            return f"<p>{escape(why_text(entry.event))}</p>"  # rich text is wrapped
        if role == Qt.ItemDataRole.ForegroundRole:
            if index.column() == 0 or self.is_ahead(entry):
                return self.theme.color("muted")
            return self.kind_color(entry) if index.column() == 1 else None
        return None

    def is_ahead(self, entry: LoggedEvent) -> bool:
        """Whether the event is later than the session's cursor."""
        return self.cursor_ns is not None and self.wall_ns(entry) > self.cursor_ns

    def kind_color(self, entry: LoggedEvent) -> QColor:
        kind = BY_NAME.get(entry.event.kind)
        return self.theme.color("text" if kind is None else kind.color)

    def head(self, entry: LoggedEvent) -> tuple[str, str, str]:
        return self._text(entry, 0), self._text(entry, 1), self._text(entry, 2)

    def _text(self, entry: LoggedEvent, column: int) -> str:
        if column == 0:
            return clock_text(self.wall_ns(entry))
        if column == 1:
            return kind_text(entry.event.kind)
        if column == 2:
            return f"#{count(entry.event.number)}" if entry.event.number else ""
        return why_text(entry.event)


def why_text(event: Event) -> str:
    """Return the event's cause in one line, followed by the request and counts that the cause does not mention."""
    cause = cause_text(event)
    mentioned = set(re.findall(r"\d+", cause))
    parts = [cause] if cause else []
    if event.other and str(event.other) not in mentioned:
        parts.append(f"for request #{event.other}")
    for number, noun in ((event.num_blocks, "block"), (event.num_tokens, "token")):
        if number and str(number) not in mentioned:
            parts.append(plural(number, noun))
    return " · ".join(parts)
