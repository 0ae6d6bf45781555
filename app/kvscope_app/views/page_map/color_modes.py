"""What a block's colour says: a key of one byte for each block, in six ways. numpy alone.

Keys are ordered by what must not be missed: where several blocks share a pixel, the highest key is shown.
Key 0 is "no block here", key 1 address space without memory, key 2 a free block.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import BlockState, Ledger, Tier, attention_shares

Keys = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.uint32] | slice

NONE: Final = 0
UNMAPPED: Final = 1
FREE: Final = 2
DISK_CACHED: Final = 3
HOST_CACHED: Final = 4
DISK: Final = 5
"""On disk and needed: of a request that was swapped out. So is `HOST`."""
HOST: Final = 6
CACHED: Final = 7
ACTIVE: Final = 8
SHARED: Final = 9
UNKNOWN: Final = 10
"""In a state or a tier of a later version."""

OWNER_CACHED: Final = 3
OWNER_ACTIVE: Final = 128
NUM_OWNER_KEYS: Final = 96

FILL_FULL: Final = 3
FILL_STEPS: Final = 100
"""Key `FILL_FULL + FILL_STEPS` is an empty block that is held: waste is what one looks for."""

UNHELD: Final = 3
ONE_HOLDER: Final = 4
MAX_HOLDERS: Final = 16

OLDEST: Final = 3
AGE_STEPS: Final = 120
_MAX_AGE: Final = (1 << 16) - 1
_HALVINGS: Final = 14.0
"""Each doubling of the age is one of so many equal steps in colour."""

UNMEASURED: Final = 3
PASSED_OVER: Final = 4
"""No layer and head that chooses among blocks chose it."""
COLDEST: Final = 5
ATTENTION_STEPS: Final = 120
ATTENTION_HALVINGS: Final = 13
"""Each halving of the share is one of so many equal steps in colour: the coldest gets 0.01 % or less."""


class ColorMode(StrEnum):
    """What the colour of a cell means."""

    STATE = "state"
    OWNER = "owner"
    FILL = "fill"
    SHARING = "sharing"
    AGE = "age"
    ATTENTION = "attention"


def keys(mode: ColorMode, ledger: Ledger, rows: Rows, block_size: int, step: int) -> Keys:
    """The keys of `rows` (ids of shape (n,), or a slice) in `mode`, shape (n,)."""
    if mode is ColorMode.STATE:
        return _state(ledger, rows)
    if mode is ColorMode.OWNER:
        return _owner(ledger, rows)
    if mode is ColorMode.FILL:
        return _fill(ledger, rows, block_size)
    if mode is ColorMode.SHARING:
        return _sharing(ledger, rows)
    if mode is ColorMode.ATTENTION:
        return _attention(ledger, rows)
    return _age(ledger, rows, step)


HAS_CONTENT: Final = np.isin(np.arange(256), (BlockState.FREE, BlockState.UNMAPPED), invert=True)
"""By `BlockState`."""
_KEYS: Final = np.full((256, 256), UNKNOWN, np.uint8)
"""By tier and state."""
_KEYS[Tier.HBM, :4] = (FREE, ACTIVE, CACHED, UNMAPPED)
_KEYS[Tier.HOST, :4] = (FREE, HOST, HOST_CACHED, UNMAPPED)
_KEYS[Tier.DISK, :4] = (FREE, DISK, DISK_CACHED, UNMAPPED)


def _state(ledger: Ledger, rows: Rows) -> Keys:
    state, tier = ledger.state[rows], ledger.tier[rows]
    result: Keys = _KEYS[Tier.HBM][state]
    result[(ledger.ref_count[rows] > 1) & (state == BlockState.ACTIVE)] = SHARED
    elsewhere = tier != Tier.HBM
    if elsewhere.any():
        result[elsewhere] = _KEYS[tier[elsewhere], state[elsewhere]]
    return result


def _without_content(result: Keys, state: npt.NDArray[np.uint8]) -> Keys:
    """Blocks that hold nothing look the same in every mode."""
    result[state == BlockState.FREE] = FREE
    result[state == BlockState.UNMAPPED] = UNMAPPED
    return result


def _owner(ledger: Ledger, rows: Rows) -> Keys:
    state = ledger.state[rows]
    result = (ledger.owner[rows] % NUM_OWNER_KEYS).astype(np.uint8)
    result += np.where(state == BlockState.ACTIVE, np.uint8(OWNER_ACTIVE), np.uint8(OWNER_CACHED))
    return _without_content(result, state)


def _fill(ledger: Ledger, rows: Rows, block_size: int) -> Keys:
    filled = np.minimum(ledger.filled[rows], block_size)
    by_filled = FILL_FULL + np.rint((1 - np.arange(block_size + 1) / block_size) * FILL_STEPS)
    result = by_filled.astype(np.uint8)[filled]
    return _without_content(result, ledger.state[rows])


def _sharing(ledger: Ledger, rows: Rows) -> Keys:
    holders = np.clip(ledger.ref_count[rows], 0, MAX_HOLDERS)
    result = (holders + UNHELD).astype(np.uint8)
    return _without_content(result, ledger.state[rows])


_KEY_BY_AGE: Final = (
    OLDEST + np.clip(AGE_STEPS * (1 - np.log2(np.arange(_MAX_AGE + 1) + 1.0) / _HALVINGS), 0, AGE_STEPS)
).astype(np.uint8)


def _age(ledger: Ledger, rows: Rows, step: int) -> Keys:
    last_used = ledger.last_used_step[rows]
    now = np.uint32(step & 0xFFFFFFFF)
    age = np.minimum(now - np.minimum(last_used, now), np.uint32(_MAX_AGE))
    result: Keys = _KEY_BY_AGE[age]
    return _without_content(result, ledger.state[rows])


def _attention(ledger: Ledger, rows: Rows) -> Keys:
    """By its share of the attention; where that is not measured, by the share of layers and heads that chose it."""
    units, skipped = ledger.attention[rows], ledger.skipped[rows]
    halvings = -np.log2(np.maximum(attention_shares(units), 2.0**-ATTENTION_HALVINGS))
    levels = np.where(units == 0, 1 - attention_shares(skipped), 1 - halvings / ATTENTION_HALVINGS)
    result = (COLDEST + np.rint(ATTENTION_STEPS * levels)).astype(np.uint8)
    result[(units == 0) & (skipped == 0)] = UNMEASURED
    result[attention_shares(skipped) >= 1.0] = PASSED_OVER
    return _without_content(result, ledger.state[rows])
