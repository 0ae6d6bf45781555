"""Selection of a session: the request, block, rows or batch that all its views highlight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QObject, Signal


@dataclass(frozen=True, slots=True, eq=False)
class BlockComparison:
    """Two texts whose blocks are compared, by the hashes of their blocks, shape (n,) each, without 0."""

    first: npt.NDArray[np.uint64]
    second: npt.NDArray[np.uint64]
    first_label: str
    second_label: str


class SessionSelection(QObject):
    """Selection of a session: at most one block, and at most one of a request, a set of ledger rows, a batch, and a
    comparison.
    """

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
        self.comparison: BlockComparison | None = None
        """Texts whose blocks the page map compares, or None."""

    def select_request(self, number: int | None) -> None:
        """Select a request, or none if `number` is None. Clears the highlighted rows, the batch and the comparison."""
        if number != self.request or self.highlighted_rows is not None or self.batch or self.comparison is not None:
            self._select(request=number)

    def select_batch(self, numbers: tuple[int, ...]) -> None:
        """Highlight the requests of a step. Clears the selected request, the highlighted rows and the comparison."""
        if numbers != self.batch:
            self._select(batch=numbers)

    def select_block(self, block: int | None) -> None:
        if block == self.block:
            return
        self.block = block
        self.changed.emit()

    def highlight_rows(self, rows: npt.NDArray[np.uint32]) -> None:
        """Highlight rows of the ledger. Clears the selected request, the batch and the comparison."""
        if self.highlighted_rows is None or not np.array_equal(rows, self.highlighted_rows):
            self._select(rows=rows)

    def compare(self, comparison: BlockComparison | None) -> None:
        """Compare the blocks of two texts, or none. Clears the selected request, the highlighted rows and the batch."""
        if comparison is not self.comparison:
            self._select(comparison=comparison)

    def clear(self) -> None:
        self.select_block(None)
        self.select_request(None)

    def _select(
        self,
        *,
        request: int | None = None,
        rows: npt.NDArray[np.uint32] | None = None,
        batch: tuple[int, ...] = (),
        comparison: BlockComparison | None = None,
    ) -> None:
        self.request, self.highlighted_rows, self.batch, self.comparison = request, rows, batch, comparison
        self.changed.emit()
