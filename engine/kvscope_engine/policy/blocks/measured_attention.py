"""Maps measured attention from rows of requests to rows of the ledger. Knows no tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.plan import StepPlan
from kvscope_telemetry.ledger import attention_units


def store_attention(pool: BlockPool, plan: StepPlan, shares: NDArray[np.float32], step: int) -> None:
    """`shares` (num_single_token, blocks) of the plan's decodes, whose tables are as they were when it ran."""
    ids, values = _by_block(pool, plan, shares)
    if len(ids):
        pool.measure(ids, attention_units(values), step)


def store_skips(pool: BlockPool, plan: StepPlan, skips: NDArray[np.float32]) -> None:
    """`skips` (num_single_token, blocks), alike."""
    ids, values = _by_block(pool, plan, skips)
    if len(ids):
        pool.skip(ids, attention_units(values))


def _by_block(
    pool: BlockPool, plan: StepPlan, rows: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Every block of the plan's decodes, and what its row says of it."""
    decodes = plan.scheduled[: plan.num_single_token]
    tables = [item.request.block_table[: item.start // pool.block_size + 1] for item in decodes]
    if not tables:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    ids = np.concatenate([np.array(table, np.int64) for table in tables])
    return ids, np.concatenate([row[: len(table)] for row, table in zip(rows, tables, strict=True)])
