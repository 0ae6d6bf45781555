"""Item model of the moments in a block's history, newest first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, ClassVar, Final

from PySide6.QtCore import QModelIndex, QObject, Qt
from PySide6.QtGui import QFont

from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.fonts import sans
from kvscope_app.ui.number_text import count
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.views.inspector.block_history_labels import KIND_COLORS, moment_text
from kvscope_app.views.table import Index, TableHead, TableModel
from kvscope_telemetry.summaries.block_moments import BlockMoment

HEADERS: Final = ("Time", "What happened", "Step")
DESCRIPTION_COLUMN: Final = 1


class MomentModel(TableModel):
    table_head: ClassVar[TableHead] = TableHead(HEADERS)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self.text_of: Callable[[BlockMoment], str] = lambda moment: ""
        """Function that returns the block's text at a moment, "" if unknown."""
        self.current_row = -1
        """Row of the last moment at or before the cursor, -1 if there is none."""
        self._moments: tuple[BlockMoment, ...] = ()

    def show_cursor(self, time_ns: int) -> bool:
        """Highlight the last moment at or before `time_ns`. Returns whether the highlighted row changed."""
        before, self.current_row = self.current_row, self.row_at(time_ns)
        for row in {before, self.current_row} if before != self.current_row else ():
            if 0 <= row < len(self._moments):
                self.dataChanged.emit(self.index(row, 0), self.index(row, len(HEADERS) - 1))
        return before != self.current_row

    def show_moments(self, moments: tuple[BlockMoment, ...]) -> None:
        before, num_new = self._moments, len(moments) - len(self._moments)
        if moments is before:
            return
        if before and num_new >= 0 and moments[0] == before[0] and moments[len(before) - 1] == before[-1]:
            first_row = 0
        elif before and num_new >= 0 and moments[-1] == before[-1] and moments[num_new] == before[0]:
            first_row = len(before)
        else:
            self.beginResetModel()
            self._moments = moments
            self.endResetModel()
            return
        if num_new:
            self.beginInsertRows(QModelIndex(), first_row, first_row + num_new - 1)
        self._moments = moments
        if num_new:
            self.endInsertRows()

    def moment_at(self, row: int) -> BlockMoment | None:
        return self._moments[len(self._moments) - 1 - row] if 0 <= row < len(self._moments) else None

    def row_at(self, time_ns: int) -> int:
        """Return the row of the last moment at or before `time_ns`, -1 if there is none."""
        index = bisect_right(self._moments, time_ns, key=lambda moment: moment.time_ns) - 1
        return len(self._moments) - 1 - index if index >= 0 else -1

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._moments)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        moment = self.moment_at(index.row())
        if moment is None:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return self.text(moment, index.column())
        if role == Qt.ItemDataRole.FontRole and index.row() == self.current_row:
            return sans(weight=QFont.Weight.DemiBold)
        if role == Qt.ItemDataRole.ToolTipRole and index.column() == DESCRIPTION_COLUMN:
            return plain_tip(f"{moment_text(moment)}\n{self.text_of(moment)}".strip())
        if role == Qt.ItemDataRole.ForegroundRole:
            return self.theme.color(
                KIND_COLORS.get(moment.kind, "text") if index.column() == DESCRIPTION_COLUMN else "muted"
            )
        return None

    def update_texts(self) -> None:
        if self._moments:
            self.dataChanged.emit(
                self.index(0, DESCRIPTION_COLUMN), self.index(len(self._moments) - 1, DESCRIPTION_COLUMN)
            )

    def text(self, moment: BlockMoment, column: int) -> str:
        if column == DESCRIPTION_COLUMN:
            block_text = " ".join(self.text_of(moment).split())
            return f"{moment_text(moment)}: “{block_text}”" if block_text else moment_text(moment)
        return clock_text(moment.time_ns) if column == 0 else count(moment.step) if moment.step else ""
