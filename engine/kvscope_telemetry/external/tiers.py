"""Gives out the rows of one tier, and keeps what each is to hold until the ledger is written.

A row's number counts within its tier; the ledger's owner says where the tier begins in it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import COLUMNS, Column, Tier

_WRITTEN: Final = ("hash", "parent", "group")
"""Columns of the ledger that events give of each block; others follow from them."""
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


class RowAllocator:
    """Hands out the rows of a tier, from 0 to `size`; `start` is where they begin in the ledger."""

    def __init__(self) -> None:
        self.size = self.start = 0
        self.num_held = 0
        self.num_used = 0
        """Rows that are in use, or were: the first that never was has this number."""
        self._free: list[int] = []
        self._changed: list[int] = []
        self._values: dict[str, list[int]] = {name: [] for name in _WRITTEN}  # of each of these

    def take(self, block_hash: int, parent: int, group: int) -> int | None:
        """A row for a block: the last given back, else the next that was never in use; None when there is none."""
        if self._free:
            row = self._free.pop()
        elif self.num_used < self.size:
            row = self.num_used
            self.num_used += 1
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

    def take_changes(self) -> tuple[npt.NDArray[np.uint32], dict[str, Column]]:
        """Return the ledger's rows that changed since the last call, each once, ascending, and their columns."""
        changed = np.array(self._changed, np.int64)
        # Of a row that changed more than once the last counts: from the end, the first of each.
        rows, index = np.unique(changed[::-1], return_index=True)
        last = len(changed) - 1 - index
        columns = {name: np.array(values, COLUMNS[name])[last] for name, values in self._values.items()}
        self._changed, self._values = [], {name: [] for name in _WRITTEN}
        return (rows + self.start).astype(np.uint32), columns
