"""The list of recordings as a table: a row a recording, notes and tags edited in place. Knows no file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from PySide6.QtCore import QModelIndex, QObject, QSortFilterProxyModel, Qt
from PySide6.QtGui import QColor, QPixmap

from kvscope_app.library.entry import UNTOLD, Entry, Facts
from kvscope_app.library.file_facts import PICTURE_SIZE
from kvscope_app.look.number_text import NOTHING, count, num_bytes, percent, seconds
from kvscope_app.look.plain_text import plain_tip
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.views.table import Column, Index, TableHead, TableModel

_ROOT: Final = QModelIndex()
SORT_ROLE: Final = Qt.ItemDataRole.UserRole


PICTURE, NAME, MODEL, WHEN, LENGTH, SIZE, PEAK, PREEMPTIONS, REQUESTS, TAGS, NOTES = range(11)
"""Places of the columns, from left to right."""
_EDITED: Final = (TAGS, NOTES)
PADDING: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryColumn(Column[[Entry]]):
    """A column; without a `key` it sorts by its text."""

    width: int = 0
    key: Callable[[Entry], float] | None = None


def _name(entry: Entry) -> str:
    state = ""
    if entry.is_missing:
        state = "  (missing)"
    elif entry.problem:
        state = "  (cannot be read)"
    elif entry.is_part:
        state = "  (not ended)"
    return f"{entry.name}{state}"


def _model(entry: Entry) -> str:
    if entry.facts.is_known:
        return entry.facts.model
    return "" if entry.problem or entry.is_missing else "…"


def _when(facts: Facts) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.start_ns / 1e9))


def _number(value: int) -> str:
    return NOTHING if value == UNTOLD else count(value)


def _fact(
    title: str,
    tip: str,
    width: int,
    text: Callable[[Facts], str],
    key: Callable[[Facts], float],
    *,
    is_number: bool = True,
) -> LibraryColumn:
    """A column of what is known once the file was read."""
    return LibraryColumn(
        title,
        lambda entry: text(entry.facts) if entry.facts.is_known else "",
        tip,
        is_number,
        width=width,
        key=lambda entry: key(entry.facts),
    )


COLUMNS: Final = (
    LibraryColumn(
        "",
        lambda entry: "",
        "The block pool over time: held by requests, cached, free",
        width=PICTURE_SIZE[0] + PADDING,
        key=lambda entry: entry.seen_s,
    ),
    LibraryColumn("Recording", _name, width=165),
    LibraryColumn("Model", _model, width=140),
    _fact("Recorded", "", 138, _when, lambda facts: facts.start_ns / 1e9, is_number=False),
    _fact("Length", "", 70, lambda facts: seconds(facts.length_s), lambda facts: facts.length_s),
    _fact("Size", "", 78, lambda facts: num_bytes(facts.num_bytes), lambda facts: facts.num_bytes),
    _fact(
        "Peak KV",
        "The largest share of the pool that requests held",
        70,
        lambda facts: NOTHING if facts.peak_usage is None else percent(facts.peak_usage, 0),
        lambda facts: -1.0 if facts.peak_usage is None else facts.peak_usage,
    ),
    _fact("Preempted", "", 80, lambda facts: _number(facts.preemptions), lambda facts: facts.preemptions),
    _fact("Requests", "", 74, lambda facts: _number(facts.requests), lambda facts: facts.requests),
    LibraryColumn("Tags", lambda entry: entry.tags, "Search tags; double-click to edit", width=96),
    LibraryColumn("Notes", lambda entry: entry.notes.replace("\n", " "), "Double-click to edit"),
)


class LibraryModel(TableModel):
    """`edited` is called with path, column and words; the list changes once that is kept."""

    table_head: ClassVar[TableHead] = TableHead.of(COLUMNS)

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
                self.dataChanged.emit(self.index(0, 0), self.index(len(entries) - 1, len(COLUMNS) - 1))
        used = {entry.picture for entry in entries}
        self._pictures = {data: made for data, made in self._pictures.items() if data in used}

    def rowCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(self.entries)

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = Qt.ItemFlag.ItemIsSelectable | Qt.ItemFlag.ItemIsEnabled
        return flags | Qt.ItemFlag.ItemIsEditable if index.column() in _EDITED else flags

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        entry, column = self.entries[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return COLUMNS[column].text(entry)
        if role == SORT_ROLE:
            return COLUMNS[column].text(entry).casefold() if (key := COLUMNS[column].key) is None else float(key(entry))
        if role == Qt.ItemDataRole.EditRole:
            return entry.tags if column == TAGS else entry.notes
        if role == Qt.ItemDataRole.DecorationRole and column == PICTURE:
            return self._picture(entry.picture)
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(tip_of(entry))
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return self.table_head.side(column)
        if role == Qt.ItemDataRole.ForegroundRole and (entry.is_missing or entry.problem):
            return QColor(self.theme.warn if column == NAME else self.theme.muted)
        return None

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        entry, column = self.entries[index.row()], index.column()
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
