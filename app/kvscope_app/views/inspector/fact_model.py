"""A page of facts as Qt's tables see it: a row a heading, a row a fact. Owns which rows there are."""

from __future__ import annotations

from typing import Any, Final

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QPersistentModelIndex, Qt, Signal
from PySide6.QtGui import QFont

from kvscope_app.look.fonts import sans
from kvscope_app.look.plain_text import plain_tip
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.views.inspector.facts import Fact, Group, Page

Index = QModelIndex | QPersistentModelIndex
_ROLES: Final = Qt.ItemDataRole
_TOP: Final = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop


class FactModel(QAbstractTableModel):
    """Names and values. A page that only says other values changes its rows in place."""

    rows_changed = Signal(list)
    """These rows read otherwise now."""

    def __init__(self) -> None:
        super().__init__()
        self.theme: Theme = DARK
        self._rows: list[Fact | Group] = []

    def show_page(self, page: Page | None) -> None:
        """Tell this from now on."""
        rows: list[Fact | Group] = []
        for group in () if page is None else page.groups:
            rows += [group, *group.facts]
        if [_name(row) for row in rows] != [_name(row) for row in self._rows]:
            self.beginResetModel()
            self._rows = rows
            self.endResetModel()
            return
        changed = [place for place, row in enumerate(rows) if row != self._rows[place] and isinstance(row, Fact)]
        self._rows = rows
        for place in changed:
            self.dataChanged.emit(self.index(place, 0), self.index(place, 1))
        if changed:
            self.rows_changed.emit(changed)

    @property
    def headings(self) -> list[int]:
        """Rows that are headings."""
        return [place for place, row in enumerate(self._rows) if isinstance(row, Group)]

    def fact_at(self, row: int) -> Fact | None:
        """None for a heading, and beyond the end."""
        found = self._rows[row] if 0 <= row < len(self._rows) else None
        return found if isinstance(found, Fact) else None

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else 2

    def flags(self, index: Index) -> Qt.ItemFlag:
        is_fact = self.fact_at(index.row()) is not None
        return Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable if is_fact else Qt.ItemFlag.NoItemFlags

    def data(self, index: Index, role: int = _ROLES.DisplayRole) -> Any:
        row = self._rows[index.row()] if index.row() < len(self._rows) else None
        if isinstance(row, Group):
            return self._heading(row, role) if index.column() == 0 else None
        if not isinstance(row, Fact):
            return None
        if role == _ROLES.DisplayRole:
            return row.name if index.column() == 0 else row.value
        if role == _ROLES.ForegroundRole:
            name = "muted" if index.column() == 0 else "accent" if row.link is not None else "text"
            return self.theme.color(name)
        if role == _ROLES.ToolTipRole:
            return plain_tip(row.tip) if row.tip else None
        return _TOP if role == _ROLES.TextAlignmentRole else None

    def _heading(self, group: Group, role: int) -> Any:
        if role == _ROLES.DisplayRole:
            return group.title
        if role == _ROLES.FontRole:
            return sans(weight=QFont.Weight.DemiBold)
        if role == _ROLES.ForegroundRole:
            return self.theme.color("text")
        return Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter if role == _ROLES.TextAlignmentRole else None


def _name(row: Fact | Group) -> str:
    return row.name if isinstance(row, Fact) else f"\0{row.title}"
