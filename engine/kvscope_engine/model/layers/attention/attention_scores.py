"""Attention scores per block, measured in some steps and summed over a step's layers.

Decides which steps are measured, and owns the sums. Must not depend on requests or on the readers of the scores.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.device_memory.read_back import RowReadBack, Rows
from kvscope_engine.model.layers.attention.sparse.page_choice import Chosen


class AttentionScores:
    """Scores of the decodes of one step or one CUDA graph, to which every layer's decode attention adds."""

    def __init__(self, totals: torch.Tensor | None = None) -> None:
        """Create without scores.

        Args:
            totals: Zeroed float32 tensor (groups, rows, blocks) to which a CUDA graph adds; None to allocate on demand.
        """
        self._graph_totals = totals
        self._totals: dict[int, torch.Tensor] = {}
        self._num_layers: Counter[int] = Counter()

    def total(self, block_tables: torch.Tensor, group: int = 0) -> torch.Tensor:
        """Return the tensor to which layers of a KV group add, float32 with the shape of `block_tables`."""
        if group not in self._totals:
            self._totals[group] = (
                torch.zeros(block_tables.shape, device=block_tables.device)
                if self._graph_totals is None
                else self._graph_totals[group, : len(block_tables)]
            )
        return self._totals[group]

    def count_layer(self, group: int = 0) -> None:
        self._num_layers[group] += 1

    def of_layer(self, block_tables: torch.Tensor, group: int = 0) -> torch.Tensor:
        """Count one more measured layer, and return `total` of its KV group."""
        self.count_layer(group)
        return self.total(block_tables, group)

    def add_chosen(self, shares: torch.Tensor, chosen: Chosen, block_tables: torch.Tensor) -> None:
        """Add the scores of a layer whose KV heads chose which blocks to read; skipped blocks get 0.

        `shares`: (num_single_token * Hkv, blocks chosen), as returned by decode attention over `heads_apart`.
        """
        total = self.of_layer(block_tables)
        columns = chosen.columns.flatten(1).clamp(max=total.shape[1] - 1)  # unused entries add 0
        total.scatter_add_(1, columns, shares.view(columns.shape).div_(chosen.columns.shape[1]))

    def start(self, back: RowReadBack, num_rows: int | None = None, width: int | None = None) -> Rows | None:
        """Start copying the first `num_rows` rows and `width` columns to the host: (groups, num_single_token, blocks).

        Each row sums to 1, or is 0 if there was no space to measure the request. Returns None if no layer was measured.
        """
        groups = sorted(self._totals)
        if not groups:
            return None
        group_totals = [self._totals[group][:num_rows, :width] for group in groups]
        pending_rows = back.start(group_totals[0][None] if len(groups) == 1 else torch.stack(group_totals))
        num_layers = np.array([self._num_layers[group] for group in groups], np.float32)[:, None, None]

        def rows() -> NDArray[np.float32]:
            scores: NDArray[np.float32] = pending_rows() / num_layers
            return scores

        return rows


class MeasuredSteps:
    """Selects the steps whose attention is measured: the first with decodes and every `every`-th after it; none if
    `every` is 0.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._num_steps = 0

    def is_due(self, num_decodes: int) -> bool:
        """Count the step that starts, and return whether it is measured."""
        if not self.any(num_decodes):
            return False
        # Counted before the step runs: if it fails, the retry is not measured.
        is_due = self._num_steps % self._every == 0
        self._num_steps += 1
        return is_due

    def any(self, num_decodes: int) -> bool:
        """Whether a step with `num_decodes` decodes may be measured. Does not count the step."""
        return bool(self._every and num_decodes)
