"""Plain copies where the host has no memory for a copy between; bytes: `test_journeys`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvscope_engine.model.kv_cache.kv_offload.block_copies import HostBlockCopier


class ShortRows(np.ndarray[Any, Any]):
    """Rows of which there is no memory for many at once."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, np.ndarray):
            raise MemoryError(f"no memory for {len(key)} rows")
        return super().__getitem__(key)


class ShortTensor:
    """As much of a tensor as the copies ask for."""

    def __init__(self, rows: ShortRows) -> None:
        self.rows = rows

    def __getitem__(self, key: Any) -> ShortTensor:
        return ShortTensor(self.rows[key])

    def numpy(self) -> ShortRows:
        return self.rows


def test_blocks_are_copied_one_by_one_where_there_is_no_memory_for_all() -> None:
    pool = np.random.default_rng(0).integers(0, 1 << 40, (6, 5))
    before, host = pool.copy(), np.zeros((6, 5), np.int64)
    words: Any = SimpleNamespace(
        parts=[
            SimpleNamespace(blocks=ShortTensor(pool[:, columns].view(ShortRows)), columns=columns)
            for columns in (slice(0, 2), slice(2, 5))
        ],
        slots=lambda rows: rows,
    )
    rows: Any = ShortTensor(host.view(ShortRows))
    copies = HostBlockCopier(words, rows)
    copies.save([4, 0, 2], [1, 2, 5])
    assert (host[[1, 2, 5]] == before[[4, 0, 2]]).all()
    pool[:] = 0
    copies.load([5, 1, 1], [0, 1, 2])
    assert (pool[:3] == before[[2, 4, 4]]).all()
    assert not pool[3:].any()
