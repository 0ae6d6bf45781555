"""Assigns ledger rows to what llama.cpp's slots hold. A row is a cell: a fixed number of tokens of one slot.

Without a unified KV cache, each slot has rows of its own, in order of its tokens. With one, all slots share the rows,
and kvscope chooses which. Knows no ledger and no requests.
"""

from __future__ import annotations

import heapq
from typing import Final

CELL_TOKENS: Final = 32
"""Minimum number of tokens per ledger row. It is doubled until the number of rows is at most `MAX_CELLS`."""
MAX_CELLS: Final = 8192


class SlotRows:
    """Rows of `num_slots` slots. `num_ctx`: tokens of each slot, or with `is_unified` of all slots together."""

    def __init__(self, num_slots: int, num_ctx: int, *, is_unified: bool) -> None:
        num_caches = 1 if is_unified else num_slots
        self.cell = CELL_TOKENS
        while num_caches * -(-num_ctx // self.cell) > MAX_CELLS:
            self.cell *= 2
        per_cache = -(-num_ctx // self.cell)
        self.num_rows = num_caches * per_cache
        self.slot_rows = 0 if is_unified else per_cache
        """Number of rows that only one slot uses; 0 if all slots share all rows."""
        self._free = list(range(self.num_rows)) if is_unified else []
        self._rows: list[list[int]] = [[] for _ in range(num_slots)]

    def of_slot(self, slot: int) -> list[int]:
        """Return the rows of a slot's cells, in order of its tokens."""
        return self._rows[slot]

    def shrink(self, slot: int, num_tokens: int) -> list[int]:
        """Free the rows that the slot does not need for `num_tokens`, and return them."""
        rows = self._rows[slot]
        freed = rows[-(-num_tokens // self.cell) :]
        del rows[len(rows) - len(freed) :]
        if not self.slot_rows:
            for row in freed:
                heapq.heappush(self._free, row)
        return freed

    def grow(self, slot: int, num_tokens: int) -> None:
        """Assign the rows that the slot needs for `num_tokens`.

        The last, partly filled cells of the slots may need up to one row per slot more than a unified cache has. Cells
        without a row are left out.
        """
        rows, num_cells = self._rows[slot], -(-num_tokens // self.cell)
        if self.slot_rows:
            first = slot * self.slot_rows
            rows.extend(range(first + len(rows), first + num_cells))
            return
        while len(rows) < num_cells and self._free:
            rows.append(heapq.heappop(self._free))
