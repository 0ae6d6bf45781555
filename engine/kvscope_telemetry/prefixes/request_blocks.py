"""Finds the blocks of a request, also after it ended, as long as its text is still cached.

Reads the ledger and the block tables of a mirror. Uses no Qt and no sockets.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import BlockState, Ledger
from kvscope_telemetry.mirror.mirror import Mirror

Rows = npt.NDArray[np.int64]


def blocks_of_request(mirror: Mirror, number: int) -> Rows:
    """Return the ledger rows that request `number` holds, shape (n,).

    For a finished request: the cached rows that it wrote, then the rows before them in its text, which it reused.
    Reused rows are found by parent hashes from its last full block backwards. That block is known if the mirror
    observed the request running; otherwise, if the request wrote no full block, no rows are found.
    """
    held_rows = mirror.requests.blocks(number).astype(np.int64)
    if held_rows.size:
        return held_rows
    ledger = mirror.ledger
    written_rows = np.flatnonzero((ledger.owner == number) & (ledger.state == BlockState.CACHED))
    return np.concatenate([written_rows, _rows_before(ledger, written_rows, mirror.last_hashes.get(number, 0))])


def _rows_before(ledger: Ledger, rows: Rows, last_hash: int) -> Rows:
    """Return the rows of the blocks before `rows` in a request's text, without `rows` themselves.

    `rows` are blocks that the request wrote. `last_hash` is the hash of the request's last full block, or 0 if it is
    unknown; that block and those before it are included. The blocks are found by their parent hashes. Blocks have no
    index by hash, so each request that wrote a part of the text costs one pass over the ledger.
    """
    seen = set(ledger.hash[rows].tolist())
    missing = ({*ledger.parent[rows].tolist(), last_hash}) - seen
    rows_found: list[int] = []
    while missing:
        wanted = missing.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        block_rows = np.flatnonzero(ledger.hash == np.uint64(wanted)) if wanted else ()
        by_hash: dict[int, list[int]] = {}
        for writer in {int(ledger.owner[row]) for row in block_rows}:
            for row in np.flatnonzero(ledger.owner == writer).tolist():
                by_hash.setdefault(int(ledger.hash[row]), []).append(row)
        by_hash.pop(0, None)
        while wanted in by_hash:
            same_rows = by_hash.pop(wanted)
            rows_found += same_rows
            seen.add(wanted)
            wanted = int(ledger.parent[same_rows[0]])
            if wanted in seen:
                break
        if wanted not in seen:
            missing.add(wanted)
    return np.array(rows_found, np.int64)
