"""The head of a table, as every model tells it: titles, tips, and on which side a column's words stand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from PySide6.QtCore import Qt

LEFT: Final = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
RIGHT: Final = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter


@dataclass(frozen=True, slots=True)
class TableHead:
    """Column by column; without `tips` there are none, and numbers alone stand at the right."""

    titles: Sequence[str]
    tips: Sequence[str] = ()
    numbers: Collection[int] = ()
    """Columns of numbers."""

    def __len__(self) -> int:
        return len(self.titles)

    def side(self, column: int) -> Qt.AlignmentFlag:
        """Of its title, and of its cells."""
        return RIGHT if column in self.numbers else LEFT

    def data(self, section: int, orientation: Qt.Orientation, role: int) -> Any:
        """What a model's `headerData` returns."""
        if orientation is not Qt.Orientation.Horizontal or not 0 <= section < len(self.titles):
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return self.titles[section]
        if role == Qt.ItemDataRole.ToolTipRole and self.tips:
            return self.tips[section] or None
        return self.side(section) if role == Qt.ItemDataRole.TextAlignmentRole else None
