"""Where attention fell, measured in some steps: which steps, and the sum over a step's layers.

Owns when a step is measured and what is added up. Knows neither blocks' owners nor who is told.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.sparse.page_choice import Chosen
from kvscope_kernels import Ops
from kvscope_kernels.attention_args import AttentionArgs


class AttentionScores:
    """Of the decodes of one step; every layer adds to it."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._totals: dict[int, torch.Tensor] = {}
        self._num_layers: Counter[int] = Counter()

    def total(self, block_tables: torch.Tensor, group: int = 0) -> torch.Tensor:
        """Where layers of a KV group add their shares: (num_single_token, blocks) float32; see `DecodeBatch`."""
        if group not in self._totals:
            self._totals[group] = torch.zeros(block_tables.shape, device=block_tables.device)
        return self._totals[group]

    def count_layer(self, group: int = 0) -> None:
        """One more of the group adds to it."""
        self._num_layers[group] += 1

    def of_layer(self, block_tables: torch.Tensor, group: int = 0) -> torch.Tensor:
        """`total`, for a layer that is counted with it."""
        self.count_layer(group)
        return self.total(block_tables, group)

    def add(self, args: AttentionArgs, group: int = 0) -> None:
        """The shares alone of a layer's decodes, queries (num_single_token, Hq, D)."""
        self._ops.block_attention(args, self.of_layer(args.block_tables, group))

    def add_chosen(self, args: AttentionArgs, chosen: Chosen, block_tables: torch.Tensor) -> None:
        """The same of a layer whose KV heads chose: queries (num_single_token * Hkv, group, D) over `heads_apart`, as
        decode attention takes them. Nothing falls on what a head passed over."""
        total = self.of_layer(block_tables)
        shares = torch.zeros(chosen.block_tables.shape, device=args.query.device)
        self._ops.block_attention(args, shares)
        columns = chosen.columns.flatten(1).clamp(max=total.shape[1] - 1)  # with nothing to add behind the last block
        total.scatter_add_(1, columns, shares.view(columns.shape).div_(chosen.columns.shape[1]))

    def rows(self) -> NDArray[np.float32] | None:
        """(groups, num_single_token, blocks): each row sums to 1. Waits for the step; None where no layer asked."""
        if not self._totals:
            return None
        return np.stack([on_host(self._totals[g]) / np.float32(self._num_layers[g]) for g in sorted(self._totals)])


def on_host(tensor: torch.Tensor) -> NDArray[np.float32]:
    """A copy; waits for the device."""
    array: NDArray[np.float32] = tensor.cpu().numpy()
    return array


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
