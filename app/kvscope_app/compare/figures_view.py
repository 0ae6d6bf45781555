"""Table of key figures: A, B, their difference, and its significance. Can be copied and exported.

Owns the choice of the time range: the whole runs or the visible range.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from PySide6.QtCore import QModelIndex, Qt, Signal
from PySide6.QtGui import QBrush, QFont, QGuiApplication
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from kvscope_app.compare.comparison_text import HEADINGS, as_tsv, cells, differing_settings_text, explanation_text
from kvscope_app.ui.fonts import sans
from kvscope_app.ui.plain_text import PlainLabel, plain_tip
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import label
from kvscope_app.ui.widgets import SegmentedControl
from kvscope_app.views.table import Index, RowTable, TableHead, TableModel
from kvscope_telemetry.exports.comparison.comparison import Comparison, ComparisonRow
from kvscope_telemetry.exports.comparison.spread import Verdict

_LABEL, _A, _B, _DIFFERENCE, _VERDICT, _PARTS_A, _PARTS_B = range(len(HEADINGS))
_ROW_PAD: Final = 6
_INTERVAL_TIP: Final = (
    "Each run is cut into 5 parts of equal length (n). The variation of a figure among them gives the 95 %"
    " interval of the difference (Welch's t-test; on logarithms for times and rates). By chance, 1 of 20 figures may"
    " seem different. A figure whose difference is not significant may still differ."
)
_PARTS_TIP: Final = "5th, 50th and 95th percentile of the figure over up to 60 equal parts of the run."
_HEAD: Final = TableHead(
    HEADINGS,
    ("", "", "", "", *map(plain_tip, (_INTERVAL_TIP, _PARTS_TIP, _PARTS_TIP))),
    (_A, _B, _DIFFERENCE, _PARTS_A, _PARTS_B),
)


class FiguresModel(TableModel):
    table_head: ClassVar[TableHead] = _HEAD

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.rows: tuple[ComparisonRow, ...] = ()
        self._cells: list[tuple[str, ...]] = []
        self._theme = DARK

    def set_rows(self, rows: tuple[ComparisonRow, ...]) -> None:
        """Replace the rows. The scroll position is retained if the number of rows stays the same."""
        if len(rows) != len(self.rows):
            self.beginResetModel()
            self.rows, self._cells = rows, [cells(row) for row in rows]
            self.endResetModel()
        else:
            self.rows, self._cells = rows, [cells(row) for row in rows]
            self.dataChanged.emit(self.index(0, 0), self.index(len(rows) - 1, len(HEADINGS) - 1))

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.layoutChanged.emit()

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self.rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        row, column = self.rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return self._cells[index.row()][column]
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _HEAD.side(column)
        if role == Qt.ItemDataRole.ForegroundRole:
            return QBrush(self._theme.color(self._color(row, column)))
        if role == Qt.ItemDataRole.FontRole and column in (_DIFFERENCE, _VERDICT) and row.verdict is Verdict.DIFFERENT:
            return sans(1.0, QFont.Weight.DemiBold)
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(explanation_text(row))
        return None

    def _color(self, row: ComparisonRow, column: int) -> str:
        if column in (_DIFFERENCE, _VERDICT):
            return "text" if row.verdict is Verdict.DIFFERENT else "muted"
        return "muted" if column == _LABEL else "text"


class FiguresView(QWidget):
    range_chosen = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("Key figures of both runs")
        self.comparison: Comparison | None = None
        self.model = FiguresModel(self)
        self.table = RowTable("Key figures", is_multi_select=True)
        self.ranges = SegmentedControl(["Whole recordings", "Visible range"], "Range")
        self.ranges.set_tip(1, "Figures of the range that the charts show")
        self.ranges.chosen.connect(self._on_range_chosen)
        self.covers_visible_range = False
        self._widths = [0] * _PARTS_B
        self._settings_label = PlainLabel()
        self._settings_label.setWordWrap(True)
        self._settings_label.setProperty("look", "warning")
        self._build()

    def show_comparison(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.model.set_rows(comparison.rows)
        text = differing_settings_text(comparison)
        self._settings_label.setText(f"Settings differ: {text}" if text else "")
        self._settings_label.setVisible(bool(text))
        self._fit_columns()

    def select_range(self, covers_visible_range: bool) -> None:
        self.ranges.set_current(int(covers_visible_range))
        self.covers_visible_range = covers_visible_range

    def copy(self) -> None:
        if self.model.rows:
            QGuiApplication.clipboard().setText(as_tsv(self.model.rows))

    def apply_theme(self, theme: Theme) -> None:
        self.model.apply_theme(theme)

    def _on_range_chosen(self, index: int) -> None:
        self.covers_visible_range = index == 1
        self.range_chosen.emit()

    def _fit_columns(self) -> None:
        """Widen columns as needed but never narrow them: columns would jump, as the table is refreshed twice
        per second.
        """
        for column in range(_PARTS_B):
            header = self.table.horizontalHeader()
            needed_width = max(self.table.sizeHintForColumn(column), header.sectionSizeHint(column))
            if needed_width > self._widths[column]:
                self._widths[column] = needed_width
                self.table.setColumnWidth(column, needed_width)

    def _build(self) -> None:
        table = self.table
        table.setModel(self.model)
        table.fix_row_heights(_ROW_PAD)
        table.horizontalHeader().setStretchLastSection(True)
        row = QHBoxLayout()
        row.addWidget(label("Key figures", "heading"))
        row.addStretch(1)
        row.addWidget(self.ranges)
        column = QVBoxLayout(self)
        column.setContentsMargins(10, 4, 10, 8)
        column.addLayout(row)
        column.addWidget(self._settings_label)
        column.addWidget(table, 1)
