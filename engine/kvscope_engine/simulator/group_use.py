"""Counts the blocks that each KV group held during a simulation, and reports mean and maximum."""

from __future__ import annotations

import msgspec
import numpy as np

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.simulator.kv_layout import KVLayout
from kvscope_telemetry.ledger import BlockState


class GroupUse(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    window: int
    """Attention window in tokens; 0 if the group has no window."""
    num_layers: int
    token_bytes: float
    mean_blocks: float
    most_blocks: int


class GroupTally:
    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._num_steps = 0
        self._sums = np.zeros(len(layout.groups), np.int64)
        self._max = np.zeros(len(layout.groups), np.int64)

    def add(self, pool: BlockPool) -> None:
        ledger = pool.ledger.part(0, pool.num_blocks)
        held_blocks = np.bincount(ledger.group[ledger.state == BlockState.ACTIVE], minlength=len(self._sums))
        self._num_steps += 1
        self._sums += held_blocks
        np.maximum(self._max, held_blocks, out=self._max)

    def uses(self) -> tuple[GroupUse, ...]:
        return tuple(
            GroupUse(
                kind=group.kind,
                window=group.rule.window,
                num_layers=group.num_layers,
                token_bytes=group.token_bytes,
                mean_blocks=total / max(1, self._num_steps),
                most_blocks=maximum,
            )
            for group, total, maximum in zip(self._layout.groups, self._sums.tolist(), self._max.tolist(), strict=True)
        )
