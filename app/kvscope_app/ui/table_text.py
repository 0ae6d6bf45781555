"""Table rows as tab-separated text for spreadsheets."""

from __future__ import annotations

from PySide6.QtCore import QAbstractItemModel, QModelIndex, Qt
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QTableView, QTreeView

_DISPLAY = Qt.ItemDataRole.DisplayRole


def selected_rows(view: QAbstractItemView) -> list[int]:
    """Return the indices of the selected rows in ascending order. For a tree, only those of top-level rows."""
    return sorted({index.row() for index in view.selectionModel().selectedIndexes() if not index.parent().isValid()})


def as_tsv(view: QAbstractItemView, rows: list[int]) -> str:
    """Return the column titles and the cells of `rows` as text, with the visible columns in their visual order."""
    model, columns = view.model(), _columns(view)
    title = Qt.Orientation.Horizontal
    lines = [[_clean(model.headerData(column, title, _DISPLAY)) for column in columns]] if _header(view) else []
    lines += [[_clean(_text(model, row, column)) for column in columns] for row in rows]
    return "".join("\t".join(line) + "\n" for line in lines)


def _columns(view: QAbstractItemView) -> list[int]:
    header = _header(view)
    if header is None:  # a list: PySide makes columnCount of a QAbstractListModel private
        return [0]
    count = view.model().columnCount(QModelIndex())
    if header.isHidden():  # shown as cards, which contain all columns
        return list(range(count))
    indices = (header.logicalIndex(index) for index in range(count))
    return [column for column in indices if not header.isSectionHidden(column)]


def _header(view: QAbstractItemView) -> QHeaderView | None:
    if isinstance(view, QTableView):
        return view.horizontalHeader()
    return view.header() if isinstance(view, QTreeView) else None


def _text(model: QAbstractItemModel, row: int, column: int) -> object:
    return model.index(row, column).data(_DISPLAY)


def _clean(value: object) -> str:
    return "" if value is None else " ".join(str(value).split())
