"""Step in which each block was last used: written, hit by a prompt, released, or read by attention.

The ledger reports all of these except reads: a step reads all blocks of the requests that it runs, so publishing reads
would change all these rows in each frame. They are derived from block tables instead: a step writes to the last block
of each request that it runs, so the newest write to any block of a running request is also the last read of all its
blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.mirror.mirror import Mirror


def last_used_steps(mirror: Mirror) -> npt.NDArray[np.uint32]:
    """Return the step of the last use of each row of the ledger, shape (num_rows,). Takes time linear in the
    rows and the entries of block tables.
    """
    requests = mirror.requests
    steps = mirror.ledger.last_used_step.copy()
    for row in np.flatnonzero(requests.state == RequestState.RUNNING).tolist():
        tables = _active_tables(mirror, row)
        if tables.size:
            steps[tables] = np.maximum(steps[tables], mirror.ledger.last_used_step[tables].max())
    return steps


def last_used_step(mirror: Mirror, block: int, holders: Iterable[int]) -> int:
    """Return the step of the last use of one block. `holders` are the ids (`RequestInfo.number`) of the requests whose
    block tables contain the block.
    """
    requests, steps = mirror.requests, mirror.ledger.last_used_step
    rows = [row for number in holders if (row := requests.row_of(number)) is not None]
    tables = [_active_tables(mirror, row) for row in rows if requests.state[row] == RequestState.RUNNING]
    return max([int(steps[block]), *(int(steps[table].max()) for table in tables if block in table)])


def _active_tables(mirror: Mirror, row: int) -> npt.NDArray[np.int32]:
    """Return the active pool blocks in a request's block tables, all KV groups concatenated."""
    requests = mirror.requests
    tables = np.concatenate([requests.held(row, group) for group in requests.groups])
    tables = tables[tables >= requests.num_reserved]
    active: npt.NDArray[np.int32] = tables[mirror.ledger.state[tables] == BlockState.ACTIVE]
    return active
