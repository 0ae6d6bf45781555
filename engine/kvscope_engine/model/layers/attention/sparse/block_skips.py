"""Which blocks decodes passed over, counted in some steps over layers and KV heads.

Knows neither blocks' owners nor who is told.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.device_memory.read_back import Rows, RowsBack
from kvscope_engine.model.layers.attention.sparse.page_choice import Chosen

SKIP_STEPS: Final = 32
"""Every so many steps with decodes, where --page-heat does not say how many; a counted step on a GPU has no graph."""


class BlockSkips:
    """Of the decodes of one step; every layer that may choose adds to it."""

    def __init__(self) -> None:
        self._taken: torch.Tensor | None = None
        self._num_choices = 0

    def add(self, chosen: Chosen | None, block_tables: torch.Tensor, num_kv_heads: int) -> None:
        """A layer's choice; None took all."""
        batch, width = block_tables.shape
        if self._taken is None:
            self._taken = torch.zeros(batch, width + 1, device=block_tables.device)
        self._num_choices += num_kv_heads
        if chosen is None:
            self._taken += num_kv_heads
            return
        columns = chosen.columns.flatten(1)
        self._taken.scatter_add_(1, columns, torch.ones(columns.shape, device=columns.device))

    def start(self, back: RowsBack) -> Rows | None:
        """(num_single_token, blocks): of the layers and KV heads that choose, the share that passed a block over.

        They start to come down; None where no layer chose. What is behind a request's own blocks says nothing.
        """
        if self._taken is None:
            return None
        landing, num_choices = back.start(self._taken[:, :-1]), np.float32(self._num_choices)

        def rows() -> NDArray[np.float32]:
            passed: NDArray[np.float32] = 1 - landing() / num_choices
            return passed

        return rows
