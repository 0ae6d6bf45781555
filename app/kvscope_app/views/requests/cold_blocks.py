"""Which blocks of a request are hardly read: of the shares of attention that were measured. Knows no Qt."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from kvscope_app.look.number_text import count, percent, plural
from kvscope_telemetry.ledger import attention_shares
from kvscope_telemetry.state.mirror import Mirror

COLD: Final = 0.1
"""Of an even share: a block that gets less is cold."""


class ColdBlocks(NamedTuple):
    """Of the blocks of one request that were measured."""

    words: str
    coldest: int
    """Which block."""
    coldest_share: float


def cold_blocks(mirror: Mirror, number: int) -> ColdBlocks | None:
    """Of request `number`; None where nothing was measured."""
    table = mirror.requests.table(number).astype(np.int64)
    units = mirror.ledger.attention[table]
    measured = np.flatnonzero(units)
    if not measured.size:
        return None
    shares = attention_shares(units[measured])
    cold = shares < COLD / measured.size
    coldest = int(shares.argmin())
    words = (
        f"{count(int(cold.sum()))} of {plural(measured.size, 'block')} get less than a tenth of an even "
        f"share; together {percent(float(shares[cold].sum()))} of the attention"
    )
    return ColdBlocks(words, int(table[measured[coldest]]), float(shares[coldest]))
