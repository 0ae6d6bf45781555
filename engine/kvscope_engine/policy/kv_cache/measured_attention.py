"""Writes the measured attention of requests to the ledger rows of their blocks. Imports no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.step_plan import StepPlan
from kvscope_telemetry.ledger import attention_units


def store_attention(pool: BlockPool, plan: StepPlan, shares: NDArray[np.float32], step: int) -> None:
    """Write the attention that each block of the plan's decodes received to the block's row in the ledger.

    `shares` has shape (groups, num_single_token, blocks). Decodes whose shares are all 0 are ignored, since they were
    not measured for lack of memory. So are blocks that were freed in the meantime.
    """
    ids, values = _values_by_block(pool, plan, shares, np.asarray(shares.any(2)))
    if len(ids):
        pool.record_attention(ids, attention_units(values), step)


def store_skips(pool: BlockPool, plan: StepPlan, skips: NDArray[np.float32]) -> None:
    """Write to the rows of the decodes' blocks in the ledger which fraction of the KV heads of sparse layers skipped
    each.

    `skips` has shape (num_single_token, blocks): a row for each decode of the plan, and a fraction for each entry of
    its block table. It has no dimension for KV groups, because models with sparse attention have a single group.
    """
    ids, values = _values_by_block(pool, plan, skips[None], np.ones((1, len(skips)), np.bool_))
    if len(ids):
        pool.record_skips(ids, attention_units(values))


def _values_by_block(
    pool: BlockPool, plan: StepPlan, rows: NDArray[np.float32], is_selected: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the block ids of the decodes selected by `is_selected` (groups, num_single_token), and for each of
    these blocks its value in `rows` (groups, num_single_token, blocks).
    """
    decodes = plan.scheduled[: plan.num_single_token]
    ids: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    values: list[NDArray[np.float32]] = [np.empty(0, np.float32)]
    for group, group_rows in enumerate(rows):
        for item, row_values, is_row_selected in zip(decodes, group_rows, is_selected[group], strict=True):
            if not is_row_selected:
                continue
            first, stop = item.request.num_null_blocks[group], item.start // pool.block_size + 1
            table = item.request.block_tables[group][first:stop]
            ids.append(np.array(table, np.int64))
            values.append(row_values[first : first + len(table)])
    return np.concatenate(ids), np.concatenate(values)
