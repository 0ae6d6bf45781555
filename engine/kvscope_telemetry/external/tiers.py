"""The rows of one tier: which are free, and which were written since the last look.

A row's number counts within its tier; where the tier begins in the ledger is told by who lays the ledger out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import BlockState, Ledger, Tier

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
        self._hash = np.zeros(0, np.uint64)
        self._parent = np.zeros(0, np.uint64)
        self._changed: list[int] = []
        self._hashes: list[int] = []
        self._parents: list[int] = []

    def take(self, block_hash: int, parent: int) -> int | None:
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
        self._hashes.append(block_hash)
        self._parents.append(parent)
        return row

    def free(self, rows: list[int]) -> None:
        """They hold nothing any more."""
        self.num_held -= len(rows)
        self._free += rows
        self._changed += rows
        nothing = [0] * len(rows)
        self._hashes += nothing
        self._parents += nothing

    @property
    def num_used(self) -> int:
        """Rows that are in use, or were."""
        return self._next

    def cut(self, size: int) -> None:
        """There are only so many, none of which was cut off was ever in use."""
        self._settle()
        self.size = size
        self._hash, self._parent = self._hash[:size], self._parent[:size]

    def allow(self, size: int) -> None:
        """There may be so many, once the ledger is laid out anew."""
        self.size = max(self.size, size)

    def resize(self, size: int, start: int) -> None:
        """There are `size`, from row `start` of the ledger on."""
        self.allow(size)
        self._start = start
        self._settle()

    def write_all(self, ledger: Ledger, block_size: int) -> None:
        """All of them into `ledger`, which has these rows alone."""
        ledger.hash[:] = self._hash
        ledger.parent[:] = self._parent
        is_held = self._hash != 0
        ledger.state[is_held] = BlockState.CACHED
        ledger.filled[is_held] = block_size
        ledger.tier.fill(self.tier)

    def write(self, ledger: Ledger, block_size: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """What changed into the whole `ledger`: its rows, each once, and the hashes there are in them now."""
        changed = self._settle()
        ids = changed + self._start
        hashes = self._hash[changed]
        is_held = hashes != 0
        ledger.hash[ids] = hashes
        ledger.parent[ids] = self._parent[changed]
        ledger.state[ids] = np.where(is_held, np.uint8(BlockState.CACHED), np.uint8(BlockState.FREE))
        ledger.filled[ids] = np.where(is_held, np.uint16(block_size), np.uint16(0))
        return ids.astype(np.uint32), hashes

    def _settle(self) -> npt.NDArray[np.int64]:
        """The columns as of now; which rows changed since the last time, ascending."""
        if len(self._hash) < self.size:
            self._hash = np.concatenate((self._hash, np.zeros(self.size - len(self._hash), np.uint64)))
            self._parent = np.concatenate((self._parent, np.zeros(self.size - len(self._parent), np.uint64)))
        if not self._changed:
            return np.empty(0, np.int64)
        changed = np.array(self._changed, np.int64)
        # Of a row that changed more than once the last counts: from the end, the first of each.
        rows, place = np.unique(changed[::-1], return_index=True)
        last = len(changed) - 1 - place
        self._hash[rows] = np.array(self._hashes, np.uint64)[last]
        self._parent[rows] = np.array(self._parents, np.uint64)[last]
        self._changed, self._hashes, self._parents = [], [], []
        return rows
