"""The rows of one tier: which are free, and which were written since the last look.

A row's number counts within its tier; where the tier begins in the ledger is told by who lays the ledger out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import COLUMNS, BlockState, Ledger, Tier

Sizes = npt.NDArray[np.uint16]
_WRITTEN: Final = ("hash", "parent", "group")
"""Columns of the ledger that are told of each block; others follow from them."""
_DEVICE: Final = "gpu"
"""Where a medium is not told."""
_FAMILIES: Final = {
    Tier.HBM: ("gpu", "hbm", "device", "cuda", "npu", "xpu", "tpu"),
    Tier.HOST: ("cpu", "host", "dram", "ram", "pinned", "cxl"),
    Tier.DISK: (
        *("disk", "file", "fs", "nvme", "ssd", "storage", "gds", "hf3fs", "3fs", "posix"),
        *("external", "remote", "obj", "s3", "redis", "valkey", "mooncake", "nixl", "infinistore", "p2p"),
    ),
}
"""What a medium's name begins with: `CPU_TIER1` and `cpu` are host memory, `nvme0` and `STORAGE` disk. What lies on
another machine is drawn as disk, too: it is in neither of this one's memories."""


def medium_word(medium: str | None) -> str:
    """By which a medium is found: its name in small letters."""
    return _DEVICE if medium is None else medium.casefold()


@lru_cache(maxsize=256)
def tier_of(medium: str | None) -> Tier:
    """Where a medium of KV events is drawn; `Tier.UNKNOWN` where its name says nothing that is known here."""
    name = medium_word(medium).strip()
    name = name.removeprefix("local").lstrip("_- ") or name
    return next((tier for tier, words in _FAMILIES.items() if name.startswith(words)), Tier.UNKNOWN)


class Rows:
    """Of `tier`."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.size = 0
        """How many there may be in use."""
        self.num_held = 0
        self._start = 0
        self._free: list[int] = []
        self._next = 0  # the first that was never in use
        self._columns = {name: np.zeros(0, COLUMNS[name]) for name in _WRITTEN}
        self._changed: list[int] = []
        self._values: dict[str, list[int]] = {name: [] for name in _WRITTEN}  # of each of these

    def take(self, block_hash: int, parent: int, group: int) -> int | None:
        """A row for a block: the last given back, else the next that was never in use; None when there is none."""
        if self._free:
            row = self._free.pop()
        elif self._next < self.size:
            row = self._next
            self._next += 1
        else:
            return None
        self.num_held += 1
        self._changed.append(row)
        values = self._values
        values["hash"].append(block_hash)
        values["parent"].append(parent)
        values["group"].append(group)
        return row

    def free(self, rows: list[int]) -> None:
        """They hold nothing any more."""
        self.num_held -= len(rows)
        self._free += rows
        self._changed += rows
        nothing = [0] * len(rows)
        for values in self._values.values():
            values += nothing

    @property
    def num_used(self) -> int:
        """Rows that are in use, or were."""
        return self._next

    def cut(self, size: int) -> None:
        """There are only so many, none of which was cut off was ever in use."""
        self._settle()
        self.size = size
        self._columns = {name: column[:size] for name, column in self._columns.items()}

    def allow(self, size: int) -> None:
        """There may be so many, once the ledger is laid out anew."""
        self.size = max(self.size, size)

    def resize(self, size: int, start: int) -> None:
        """There are `size`, from row `start` of the ledger on."""
        self.allow(size)
        self._start = start
        self._settle()

    def write_all(self, ledger: Ledger, sizes: Sizes) -> None:
        """All of them into `ledger`, which has these rows alone. `sizes`: tokens of a block, by group."""
        for name, column in self._columns.items():
            getattr(ledger, name)[:] = column
        is_held = ledger.hash != 0
        ledger.state[is_held] = BlockState.CACHED
        ledger.filled[is_held] = sizes[ledger.group[is_held]]
        ledger.tier.fill(self.tier)

    def write(self, ledger: Ledger, sizes: Sizes) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """What changed into the whole `ledger`: its rows, each once, and the hashes there are in them now."""
        changed = self._settle()
        ids = changed + self._start
        for name, column in self._columns.items():
            getattr(ledger, name)[ids] = column[changed]
        hashes = ledger.hash[ids]
        is_held = hashes != 0
        ledger.state[ids] = np.where(is_held, np.uint8(BlockState.CACHED), np.uint8(BlockState.FREE))
        ledger.filled[ids] = np.where(is_held, sizes[ledger.group[ids]], np.uint16(0))
        return ids.astype(np.uint32), hashes

    def _settle(self) -> npt.NDArray[np.int64]:
        """The columns as of now; which rows changed since the last time, ascending."""
        for name, column in self._columns.items():
            if len(column) < self.size:
                self._columns[name] = np.concatenate((column, np.zeros(self.size - len(column), column.dtype)))
        if not self._changed:
            return np.empty(0, np.int64)
        changed = np.array(self._changed, np.int64)
        # Of a row that changed more than once the last counts: from the end, the first of each.
        rows, place = np.unique(changed[::-1], return_index=True)
        last = len(changed) - 1 - place
        for name, column in self._columns.items():
            column[rows] = np.array(self._values[name], column.dtype)[last]
        self._changed, self._values = [], {name: [] for name in _WRITTEN}
        return rows
