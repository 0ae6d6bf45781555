"""A step's attention by blocks, from rows of requests to rows of the ledger. Knows no tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.plan import StepPlan
from kvscope_telemetry.ledger import attention_units


def tell_attention(pool: BlockPool, plan: StepPlan, shares: NDArray[np.float32], step: int) -> None:
    """`shares` (num_single_token, blocks) of the plan's decodes, whose tables are as they were when it ran."""
    decodes = plan.scheduled[: plan.num_single_token]
    tables = [item.request.block_table[: item.start // pool.block_size + 1] for item in decodes]
    if not tables:
        return
    ids = np.concatenate([np.array(table, np.int64) for table in tables])
    told = np.concatenate([row[: len(table)] for row, table in zip(shares, tables, strict=True)])
    pool.measure(ids, attention_units(told), step)
