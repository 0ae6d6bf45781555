"""Other rankings of the same blocks: Quest's own, and the best that there can be. What they lose says what a ranking is
worth."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import pad

from kvscope_engine.bench.laboratory.sparse import BLOCK_SIZE, Sparse


class LargestBound(Sparse):
    """By the largest score that a key of the block could have with any of the heads that share it (Quest)."""

    def _choose(self, rows: Tensor) -> Tensor:
        up, down = rows.clamp(min=0), rows.clamp(max=0)
        bounds = (up @ self._high.mT + down @ self._low.mT).amax(2)
        bounds[..., 0] = bounds[..., -1] = math.inf
        return bounds.topk(self._num_wanted, -1).indices


class Oracle(Sparse):
    """By the attention that does fall on each block; it reads every key to know."""

    def _choose(self, rows: Tensor) -> Tensor:
        keys = self._blocks[0].flatten(2, 3)[:, :, : self._length]  # (B, Hkv, T, D)
        weights = (rows @ keys.mT).float().mul_(rows.shape[-1] ** -0.5).softmax(-1).sum(2)
        whole = pad(weights, (0, -self._length % BLOCK_SIZE))
        shares: Tensor = whole.view(*whole.shape[:2], -1, BLOCK_SIZE).sum(-1)
        shares[..., 0] = shares[..., -1] = math.inf
        return shares.topk(self._num_wanted, -1).indices
