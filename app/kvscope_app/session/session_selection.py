"""Selection of a session: the request, block, rows or batch that all its views highlight."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QObject, Signal


class SessionSelection(QObject):
    """Selection of a session: at most one block, and at most one of a request, a set of ledger rows, and a batch."""

    changed = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.request: int | None = None
        """Number of the selected request, or None."""
        self.block: int | None = None
        """Row of the selected block in the shown ledger, or None."""
        self.highlighted_rows: npt.NDArray[np.uint32] | None = None
        """Ledger rows that are highlighted instead of the blocks of a request, shape (n,), or None."""
        self.batch: tuple[int, ...] = ()
        """Numbers of the requests of a step that are highlighted together; empty if no batch is selected."""

    def select_request(self, number: int | None) -> None:
        """Select a request, or none if `number` is None. Clears the highlighted rows and the batch."""
        if number == self.request and self.highlighted_rows is None and not self.batch:
            return
        self.request, self.highlighted_rows, self.batch = number, None, ()
        self.changed.emit()

    def select_batch(self, numbers: tuple[int, ...]) -> None:
        """Highlight the requests of a step. Clears the selected request and the highlighted rows."""
        if numbers != self.batch:
            self.request, self.highlighted_rows, self.batch = None, None, numbers
            self.changed.emit()

    def select_block(self, block: int | None) -> None:
        if block == self.block:
            return
        self.block = block
        self.changed.emit()

    def highlight_rows(self, rows: npt.NDArray[np.uint32]) -> None:
        """Highlight rows of the ledger. Clears the selected request and the batch."""
        if self.highlighted_rows is not None and np.array_equal(rows, self.highlighted_rows):
            return
        self.request, self.highlighted_rows, self.batch = None, rows, ()
        self.changed.emit()

    def clear(self) -> None:
        self.select_block(None)
        self.select_request(None)
