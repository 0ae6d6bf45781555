"""The list of recordings as a table: a row a recording, notes and tags edited in place. Knows no file."""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Any, Final

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, QSortFilterProxyModel, Qt
from PySide6.QtGui import QColor, QPixmap

from kvscope_app.library.entry import UNTOLD, Entry
from kvscope_app.look.number_text import NOTHING, count, num_bytes, percent, seconds
from kvscope_app.look.plain_text import plain_tip
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.views.table_head import TableHead

Index = QModelIndex | QPersistentModelIndex
_ROOT: Final = QModelIndex()
SORT_ROLE: Final = Qt.ItemDataRole.UserRole


class Column(IntEnum):
    """From left to right."""

    PICTURE = 0
    NAME = 1
    MODEL = 2
    WHEN = 3
    LENGTH = 4
    SIZE = 5
    PEAK = 6
    PREEMPTIONS = 7
    REQUESTS = 8
    TAGS = 9
    NOTES = 10


TITLES: Final = {
    Column.PICTURE: "",
    Column.NAME: "Recording",
    Column.MODEL: "Model",
    Column.WHEN: "Recorded",
    Column.LENGTH: "Length",
    Column.SIZE: "Size",
    Column.PEAK: "Peak KV",
    Column.PREEMPTIONS: "Preempted",
    Column.REQUESTS: "Requests",
    Column.TAGS: "Tags",
    Column.NOTES: "Notes",
}
_TIPS: Final = {
    Column.PICTURE: "The block pool over time: held by requests, cached, free",
    Column.PEAK: "The largest share of the pool that requests held",
    Column.TAGS: "Search tags; double-click to edit",
    Column.NOTES: "Double-click to edit",
}
_HEAD: Final = TableHead(
    [TITLES[column] for column in Column],
    [_TIPS.get(column, "") for column in Column],
    range(Column.LENGTH, Column.TAGS),
)
_EDITED: Final = (Column.TAGS, Column.NOTES)


class LibraryModel(QAbstractTableModel):
    """`edited` is called with path, column and words; the list changes once that is kept."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.entries: tuple[Entry, ...] = ()
        self.theme: Theme = DARK
        self.edited: Any = None
        self._pictures: dict[bytes, QPixmap] = {}

    def show(self, entries: tuple[Entry, ...]) -> None:
        """Show these; where they are the same recordings in the same order, selection and editors stay."""
        if [entry.path for entry in entries] != [entry.path for entry in self.entries]:
            self.beginResetModel()
            self.entries = entries
            self.endResetModel()
        else:
            self.entries = entries
            if entries:
                self.dataChanged.emit(self.index(0, 0), self.index(len(entries) - 1, len(Column) - 1))
        used = {entry.picture for entry in entries}
        self._pictures = {data: made for data, made in self._pictures.items() if data in used}

    def rowCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(self.entries)

    def columnCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(Column)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        return _HEAD.data(section, orientation, role)

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = Qt.ItemFlag.ItemIsSelectable | Qt.ItemFlag.ItemIsEnabled
        return flags | Qt.ItemFlag.ItemIsEditable if index.column() in _EDITED else flags

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        entry, column = self.entries[index.row()], Column(index.column())
        if role == Qt.ItemDataRole.DisplayRole:
            return text_of(entry, column)
        if role == SORT_ROLE:
            return _sort_key(entry, column)
        if role == Qt.ItemDataRole.EditRole:
            return entry.tags if column is Column.TAGS else entry.notes
        if role == Qt.ItemDataRole.DecorationRole and column is Column.PICTURE:
            return self._picture(entry.picture)
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(tip_of(entry))
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _HEAD.side(column)
        if role == Qt.ItemDataRole.ForegroundRole and (entry.is_missing or entry.problem):
            return QColor(self.theme.warn if column is Column.NAME else self.theme.muted)
        return None

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        entry, column = self.entries[index.row()], Column(index.column())
        before = self.data(index, Qt.ItemDataRole.EditRole)
        if role != Qt.ItemDataRole.EditRole or column not in _EDITED or str(value) == before or self.edited is None:
            return False
        self.edited(entry.path, column, str(value))
        return True

    def _picture(self, data: bytes) -> QPixmap | None:
        if not data:
            return None
        if data not in self._pictures:
            made = QPixmap()
            made.loadFromData(data)
            self._pictures[data] = made
        return self._pictures[data]


class LibraryProxy(QSortFilterProxyModel):
    """Those that have every word that is searched for, in an order a person chose."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._words: tuple[str, ...] = ()
        self.setSortRole(SORT_ROLE)

    def search(self, text: str) -> None:
        """Show only what has all words of `text` somewhere."""
        self._words = tuple(text.casefold().split())
        self.invalidate()

    def filterAcceptsRow(self, row: int, parent: Index) -> bool:
        model = self.sourceModel()
        assert isinstance(model, LibraryModel), "it sorts nothing else"
        return all(word in model.entries[row].words for word in self._words)

    def entry_at(self, row: int) -> Entry:
        """The one in a row as it is shown."""
        model = self.sourceModel()
        assert isinstance(model, LibraryModel), "it sorts nothing else"
        return model.entries[self.mapToSource(self.index(row, 0)).row()]


def text_of(entry: Entry, column: Column) -> str:
    """What a cell says."""
    facts = entry.facts
    if column is Column.NAME:
        return f"{entry.name}{_state(entry)}"
    if column is Column.TAGS:
        return entry.tags
    if column is Column.NOTES:
        return entry.notes.replace("\n", " ")
    if column is Column.PICTURE:
        return ""
    if not facts.is_known:
        return "…" if column is Column.MODEL and not entry.problem and not entry.is_missing else ""
    if column is Column.WHEN:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.start_ns / 1e9))
    return {
        Column.MODEL: facts.model,
        Column.LENGTH: seconds(facts.length_s),
        Column.SIZE: num_bytes(facts.num_bytes),
        Column.PEAK: NOTHING if facts.peak_usage is None else percent(facts.peak_usage, 0),
        Column.PREEMPTIONS: _number(facts.preemptions),
        Column.REQUESTS: _number(facts.requests),
    }[column]


def _number(value: int) -> str:
    return NOTHING if value == UNTOLD else count(value)


def tip_of(entry: Entry) -> str:
    """All about it that has no column."""
    lines = [entry.open_path]
    if entry.problem:
        lines.append(entry.problem)
    if entry.is_missing:
        lines.append("The file is missing: locate it, or remove it from the list.")
    if entry.facts.has_texts:
        lines.append("Contains prompt and answer text.")
    if entry.notes:
        lines.append(entry.notes)
    return "\n".join(lines)


def _state(entry: Entry) -> str:
    if entry.is_missing:
        return "  (missing)"
    if entry.problem:
        return "  (cannot be read)"
    return "  (not ended)" if entry.is_part else ""


def _sort_key(entry: Entry, column: Column) -> Any:
    facts = entry.facts
    keys = {
        Column.PICTURE: entry.seen_s,
        Column.WHEN: facts.start_ns / 1e9,
        Column.LENGTH: facts.length_s,
        Column.SIZE: float(facts.num_bytes),
        Column.PEAK: -1.0 if facts.peak_usage is None else facts.peak_usage,
        Column.PREEMPTIONS: float(facts.preemptions),
        Column.REQUESTS: float(facts.requests),
    }
    return keys[column] if column in keys else text_of(entry, column).casefold()
