"""Share of layers and KV heads whose decodes skip a block, counted in some of the steps.

Does not know which request owns a block or who reads the counts.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.device_memory.read_back import RowReadBack, Rows
from kvscope_engine.model.layers.attention.sparse.page_choice import Chosen

SKIP_STEPS: Final = 32
"""Default interval, in steps with decodes, between counted steps (see --page-heat).

On a GPU, they run without CUDA graph.
"""


class BlockSkips:
    """Counts of the decodes of one step; every layer that chooses blocks adds to it."""

    def __init__(self) -> None:
        self._taken: torch.Tensor | None = None
        self._num_choices = 0

    def add(self, chosen: Chosen | None, block_tables: torch.Tensor, num_kv_heads: int) -> None:
        """Add the choice of a layer; None means that it read all blocks."""
        batch, width = block_tables.shape
        if self._taken is None:
            self._taken = torch.zeros(batch, width + 1, device=block_tables.device)
        self._num_choices += num_kv_heads
        if chosen is None:
            self._taken += num_kv_heads
            return
        columns = chosen.columns.flatten(1)
        self._taken.scatter_add_(1, columns, torch.ones(columns.shape, device=columns.device))

    def start(self, back: RowReadBack) -> Rows | None:
        """Start the copy to the host of (num_single_token, blocks): the share of layers and KV heads that skipped each
        block.

        Returns None if no layer chose. Values beyond a request's own blocks are meaningless.
        """
        if self._taken is None:
            return None
        landing, num_choices = back.start(self._taken[:, :-1]), np.float32(self._num_choices)

        def rows() -> NDArray[np.float32]:
            passed: NDArray[np.float32] = 1 - landing() / num_choices
            return passed

        return rows
