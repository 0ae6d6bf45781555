"""Counts, in some of the steps, the share of layers and KV heads in which decodes skip each block.

Must not depend on requests or on the readers of the counts.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.device_memory.read_back import RowReadBack, Rows
from kvscope_engine.model.layers.attention.sparse.page_choice import Chosen

SKIP_STEPS: Final = 32
"""Default interval between counted steps, in steps with decodes (see --page-heat).

On a GPU, counted steps run without a CUDA graph.
"""


class BlockSkips:
    """Counts of skipped blocks for the decodes of one step. Every layer that chooses blocks adds to them."""

    def __init__(self) -> None:
        self._choice_counts: torch.Tensor | None = None
        self._num_choices = 0

    def add_choice(self, chosen: Chosen | None, block_tables: torch.Tensor, num_kv_heads: int) -> None:
        """Count, for each block, the KV heads of a layer that chose it. `chosen` is None if the layer read all
        blocks.
        """
        batch, width = block_tables.shape
        if self._choice_counts is None:
            self._choice_counts = torch.zeros(batch, width + 1, device=block_tables.device)
        self._num_choices += num_kv_heads
        if chosen is None:
            self._choice_counts += num_kv_heads
            return
        columns = chosen.columns.flatten(1)
        self._choice_counts.scatter_add_(1, columns, torch.ones(columns.shape, device=columns.device))

    def start(self, back: RowReadBack) -> Rows | None:
        """Start copying to the host the share of layers and KV heads that skipped each block, (num_single_token,
        blocks).

        Returns None if no layer chose blocks. Values beyond a request's last block are meaningless.
        """
        if self._choice_counts is None:
            return None
        pending_counts, num_choices = back.start(self._choice_counts[:, :-1]), np.float32(self._num_choices)

        def rows() -> NDArray[np.float32]:
            skipped_share: NDArray[np.float32] = 1 - pending_counts() / num_choices
            return skipped_share

        return rows
