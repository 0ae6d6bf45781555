"""The rank of every block: what mode and selection make of the ledger. One owner of the ranks; numpy alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvscope_app.views.page_map.color_modes import HAS_CONTENT, ColorMode
from kvscope_app.views.page_map.drawing.grid import Grid
from kvscope_app.views.page_map.drawing.ink import Emphasis
from kvscope_telemetry.ledger import BlockState, Ledger

Ids = npt.NDArray[np.uint32]
Ranks = npt.NDArray[np.uint16]

_NO_IDS = np.empty(0, np.uint32)


def distinct(ids: Ids) -> Ids:
    """Each of `ids` once, ascending. In each frame: np.unique takes several times as long."""
    ordered = np.sort(ids)
    is_first = np.empty(ids.size, np.bool_)
    is_first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


class Cells:
    """Ranks of `grid`'s cells; those without a block, at the ends of sections and in headings, stay 0.

    `ledger` is read, never written. Call `refresh` for blocks that changed, `refresh_all` for everything.
    """

    def __init__(self, ledger: Ledger, grid: Grid, block_size: int, mode: ColorMode) -> None:
        self.ledger = ledger
        self.grid = grid
        self.block_size = block_size
        self.mode = mode
        self.tells_filled = True
        """Otherwise cells are drawn whole: how full they are nobody knows."""
        self.step = 0
        self.selected: Ids = _NO_IDS
        self.has_selection = False
        self._ranks: Ranks = np.zeros(grid.num_cells, np.uint16)
        self._emphasis = np.full(grid.num_blocks, Emphasis.NORMAL << 8, np.uint16)

    @property
    def ranks(self) -> Ranks:
        """Rank of each cell, shape (rows * columns,)."""
        return self._ranks

    def ranks_of(self, ids: Ids) -> Ranks:
        """Rank of each block, shape of `ids`."""
        return self._ranks[self.grid.cells_of(ids)]

    @property
    def table(self) -> Ranks:
        """The same, shape (rows, columns)."""
        return self._ranks.reshape(self.grid.rows, self.grid.columns)

    def refresh(self, ids: Ids) -> None:
        """Take the rows `ids`, shape (n,), from the ledger."""
        fresh = self.mode.keys(self.ledger, ids, self.block_size, self.step)
        self._ranks[self.grid.cells_of(ids)] = self._emphasis[ids] | fresh

    def refresh_all(self) -> None:
        """Take every row from the ledger."""
        fresh = self.mode.keys(self.ledger, slice(None), self.block_size, self.step)
        for part in self.grid.sections:
            blocks, cells = slice(part.start, part.end), slice(part.first_cell, part.first_cell + part.size)
            np.bitwise_or(self._emphasis[blocks], fresh[blocks], out=self._ranks[cells])

    def select(self, ids: Ids | None) -> Ids:
        """Let `ids` stand out from all others, or nothing (None). Returns the ids whose look changed.

        An empty selection still dims the rest: the selected request holds no block now.
        """
        fresh = _NO_IDS if ids is None else np.unique(ids[ids < self.grid.num_blocks])
        if (ids is not None) == self.has_selection:
            changed = np.setxor1d(fresh, self.selected, assume_unique=True)
        else:
            changed = np.arange(self.grid.num_blocks, dtype=np.uint32)
        self.has_selection = ids is not None
        self._emphasis[changed] = (Emphasis.DIMMED if self.has_selection else Emphasis.NORMAL) << 8
        self._emphasis[fresh] = Emphasis.SELECTED << 8
        self.selected = fresh
        if changed.size:
            self.refresh(changed)
        return changed

    def fill_share(self, ids: Ids) -> npt.NDArray[np.float32]:
        """Share of each block's slots that hold a token, 0 to 1; 1 for one without content, which is drawn whole."""
        if not self.tells_filled:
            return np.ones(ids.size, np.float32)
        filled = self.ledger.filled[ids].astype(np.float32) / np.float32(self.block_size)
        return np.where(HAS_CONTENT[self.ledger.state[ids]], filled, np.float32(1))

    def unmapped(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which blocks are address space without memory."""
        unmapped: npt.NDArray[np.bool_] = self.ledger.state[ids] == BlockState.UNMAPPED
        return unmapped

    def shared(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which blocks more than one request holds."""
        return self.ledger.ref_count[ids] > 1
