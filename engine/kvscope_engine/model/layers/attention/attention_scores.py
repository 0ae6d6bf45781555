"""Where attention fell, measured in some steps: which steps, and the sum over a step's layers.

Owns when a step is measured and what is added up. Knows neither blocks' owners nor who is told.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.device_memory.read_back import Rows, RowsBack
from kvscope_engine.model.layers.attention.sparse.page_choice import Chosen


class AttentionScores:
    """Of the decodes of one step, or of one graph; every layer's decode attention adds to it."""

    def __init__(self, totals: torch.Tensor | None = None) -> None:
        """`totals` (groups, rows, blocks) float32: where a graph's layers add, zeros before them; without, made as they
        are asked for."""
        self._given = totals
        self._totals: dict[int, torch.Tensor] = {}
        self._num_layers: Counter[int] = Counter()

    def total(self, block_tables: torch.Tensor, group: int = 0) -> torch.Tensor:
        """Where layers of a KV group add their shares: (num_single_token, blocks) float32; see `DecodeBatch`."""
        if group not in self._totals:
            self._totals[group] = (
                torch.zeros(block_tables.shape, device=block_tables.device)
                if self._given is None
                else self._given[group, : len(block_tables)]
            )
        return self._totals[group]

    def count_layer(self, group: int = 0) -> None:
        """One more of the group adds to it."""
        self._num_layers[group] += 1

    def of_layer(self, block_tables: torch.Tensor, group: int = 0) -> torch.Tensor:
        """`total`, for a layer that is counted with it."""
        self.count_layer(group)
        return self.total(block_tables, group)

    def add_chosen(self, shares: torch.Tensor, chosen: Chosen, block_tables: torch.Tensor) -> None:
        """Those of a layer whose KV heads chose, (num_single_token * Hkv, blocks that one chose), as decode attention
        over `heads_apart` told them. Nothing falls on what a head passed over."""
        total = self.of_layer(block_tables)
        columns = chosen.columns.flatten(1).clamp(max=total.shape[1] - 1)  # with nothing to add behind the last block
        total.scatter_add_(1, columns, shares.view(columns.shape).div_(chosen.columns.shape[1]))

    def start(self, back: RowsBack, num_rows: int | None = None, width: int | None = None) -> Rows | None:
        """(groups, num_single_token, blocks): each row sums to 1; all 0 where there was no room to measure the request.
        The first rows and columns start to come down; None where no layer asked."""
        groups = sorted(self._totals)
        if not groups:
            return None
        of_groups = [self._totals[group][:num_rows, :width] for group in groups]
        landing = back.start(of_groups[0][None] if len(groups) == 1 else torch.stack(of_groups))
        num_layers = np.array([self._num_layers[group] for group in groups], np.float32)[:, None, None]

        def rows() -> NDArray[np.float32]:
            landed: NDArray[np.float32] = landing() / num_layers
            return landed

        return rows


class MeasuredSteps:
    """The first step with decodes and every `every`-th after it; 0: none."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._num_steps = 0

    def is_due(self, num_decodes: int) -> bool:
        """Whether the step that begins is measured."""
        if not self.any(num_decodes):
            return False
        is_due = self._num_steps % self._every == 0  # counted where a step may fail: it is tried again without
        self._num_steps += 1
        return is_due

    def any(self, num_decodes: int) -> bool:
        """The same of a step that counts for nothing, as if it were due."""
        return bool(self._every and num_decodes)
