"""Allocates the ledger rows of one tier, and stores their new contents until the ledger is written.

Row numbers count within the tier. The owner of the ledger sets the row at which the tier begins.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import COLUMNS, Column, Tier

_EVENT_COLUMNS: Final = ("hash", "parent", "group")
"""Ledger columns that KV events determine for each block. Other columns are derived from these."""
_DEFAULT_MEDIUM: Final = "gpu"
_MEDIA_PREFIXES: Final = {
    Tier.HBM: ("gpu", "hbm", "device", "cuda", "npu", "xpu", "tpu"),
    Tier.HOST: ("cpu", "host", "dram", "ram", "pinned", "cxl"),
    Tier.DISK: (
        *("disk", "file", "fs", "nvme", "ssd", "storage", "gds", "hf3fs", "3fs", "posix"),
        *("external", "remote", "obj", "s3", "redis", "valkey", "mooncake", "nixl", "infinistore", "p2p"),
    ),
}
"""Map from each tier to the prefixes of its media names: `CPU_TIER1` and `cpu` are host memory, `nvme0` and `STORAGE`
are disk.

Storage on other machines also counts as disk, because it is in neither of this machine's memories.
"""


def medium_name(medium: str | None) -> str:
    """Return the case-folded name of a medium, or `gpu` if it is None."""
    return _DEFAULT_MEDIUM if medium is None else medium.casefold()


@lru_cache(maxsize=256)
def tier_of(medium: str | None) -> Tier:
    """Return the tier of a medium of KV events; `Tier.UNKNOWN` if its name is not recognized."""
    name = medium_name(medium).strip()
    name = name.removeprefix("local").lstrip("_- ") or name
    return next((tier for tier, prefixes in _MEDIA_PREFIXES.items() if name.startswith(prefixes)), Tier.UNKNOWN)


class RowAllocator:
    """Allocates the rows of a tier, 0 to `size` - 1; `start` is the tier's first row in the ledger."""

    def __init__(self) -> None:
        self.size = self.start = 0
        self.num_held = 0
        self.num_used = 0
        """Number of rows that are or were in use. Row `num_used` and all later rows were never used."""
        self._free: list[int] = []
        self._changed: list[int] = []
        self._values: dict[str, list[int]] = {name: [] for name in _EVENT_COLUMNS}  # of each changed row

    def allocate(self, block_hash: int, parent: int, group: int) -> int | None:
        """Allocate a row for a block: the row freed most recently or, if none is free, the next row that was
        never used. Returns None if all rows are in use.
        """
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
        self.num_held -= len(rows)
        self._free += rows
        self._changed += rows
        zeros = [0] * len(rows)
        for values in self._values.values():
            values += zeros

    def drain_changes(self) -> tuple[npt.NDArray[np.uint32], dict[str, Column]]:
        """Return the ledger rows that changed since the last call (ascending, without duplicates), and the
        columns to write for them.
        """
        changed = np.array(self._changed, np.int64)
        # Keep the last change of each row: np.unique returns the first occurrence, so the order is reversed.
        rows, index = np.unique(changed[::-1], return_index=True)
        last = len(changed) - 1 - index
        columns = {name: np.array(values, COLUMNS[name])[last] for name, values in self._values.items()}
        self._changed, self._values = [], {name: [] for name in _EVENT_COLUMNS}
        return (rows + self.start).astype(np.uint32), columns
