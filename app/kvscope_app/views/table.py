"""Base classes of tables: columns with titles and tooltips, a model with headers, and selection of whole rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, ParamSpec, Self

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QPersistentModelIndex, Qt, Signal
from PySide6.QtGui import QColor, QIcon, QKeyEvent, QPixmap
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QStyledItemDelegate, QStyleOptionViewItem, QTableView

from kvscope_app.ui.zoom import scaled

LEFT: Final = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
RIGHT: Final = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
Index = QModelIndex | QPersistentModelIndex
_ROOT: Final = QModelIndex()
_P = ParamSpec("_P")
_SAMPLE_PADDING: Final = 26


@dataclass(frozen=True, slots=True)
class TableColumn(Generic[_P]):
    """Column of a table. `text` returns a cell's text for the given row data."""

    title: str
    text: Callable[_P, str]
    tip: str = ""
    is_number: bool = False
    sample: str = ""
    """Widest usual cell text, from which the column's width is computed."""


@dataclass(frozen=True, slots=True)
class TableHead:
    """Titles, tooltips and alignment of a table's columns. Without `tips`, there are no tooltips."""

    titles: Sequence[str]
    tips: Sequence[str] = ()
    numbers: Collection[int] = ()

    @classmethod
    def of(cls, columns: Sequence[TableColumn[...]]) -> Self:
        numbers = frozenset(index for index, column in enumerate(columns) if column.is_number)
        return cls([column.title for column in columns], [column.tip for column in columns], numbers)

    def __len__(self) -> int:
        return len(self.titles)

    def side(self, column: int) -> Qt.AlignmentFlag:
        return RIGHT if column in self.numbers else LEFT

    def data(self, section: int, orientation: Qt.Orientation, role: int) -> Any:
        if orientation is not Qt.Orientation.Horizontal or not 0 <= section < len(self.titles):
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return self.titles[section]
        if role == Qt.ItemDataRole.ToolTipRole and self.tips:
            return self.tips[section] or None
        return self.side(section) if role == Qt.ItemDataRole.TextAlignmentRole else None


class TableModel(QAbstractTableModel):
    table_head: ClassVar[TableHead]

    def columnCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(self.table_head)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        return self.table_head.data(section, orientation, role)


class RowTable(QTableView):
    """Table without grid lines. Whole rows are selected: one, or several if `is_multi_select`."""

    def __init__(self, name: str, *, is_multi_select: bool) -> None:
        super().__init__()
        self.setAccessibleName(name)
        self.setShowGrid(False)
        self.setWordWrap(False)
        self.setTabKeyNavigation(False)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        mode = QAbstractItemView.SelectionMode
        self.setSelectionMode(mode.ExtendedSelection if is_multi_select else mode.SingleSelection)
        self.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.verticalHeader().hide()
        self.horizontalHeader().setHighlightSections(False)

    def fix_row_heights(self, padding: int) -> None:
        """Set the height of all rows to a line of text plus `padding` pixels at 100 % zoom."""
        self.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        self.verticalHeader().setDefaultSectionSize(self.fontMetrics().height() + scaled(padding))

    def fit_samples(self, columns: Sequence[TableColumn[...]]) -> None:
        self.horizontalHeader().setMinimumSectionSize(40)
        for index, column in enumerate(columns):
            width = max(self.fontMetrics().horizontalAdvance(text) for text in (column.sample, column.title))
            self.setColumnWidth(index, width + scaled(_SAMPLE_PADDING))


class SwatchDelegate(QStyledItemDelegate):
    """Delegate that paints colour swatches unchanged in selected rows. Qt's styles would tint them."""

    def initStyleOption(self, option: QStyleOptionViewItem, index: Index) -> None:
        super().initStyleOption(option, index)
        color = index.data(Qt.ItemDataRole.DecorationRole)
        if isinstance(color, QColor):
            square = QPixmap(option.decorationSize)
            square.fill(color)
            icon = QIcon(square)
            icon.addPixmap(square, QIcon.Mode.Selected)
            option.icon = icon


class OpenableTable(RowTable):
    open_requested = Signal()

    def __init__(self, name: str) -> None:
        super().__init__(name, is_multi_select=True)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.doubleClicked.connect(lambda _: self.open_requested.emit())

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.open_requested.emit()
        else:
            super().keyPressEvent(event)
