"""Copies whole blocks between the pool and host memory. On a CPU, these are plain memory copies.

Measured for 30 layers of 12 KiB per block: numpy indexing moves 9 to 17 GB/s, a `memmove` per block and layer the same,
torch's index_select and index_copy 5 to 6 GB/s, since they copy twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvscope_engine.model.kv_cache.kv_offload.block_layout import BlockLayout
from kvscope_engine.model.kv_cache.kv_offload.copy_speed import CopySpeed

WordRows: TypeAlias = npt.NDArray[Any]
"""Array of machine words, shape (num_rows, words per row)."""
Ids: TypeAlias = npt.NDArray[np.intp]


class BlockCopier(Protocol):
    """Copies between blocks of the pool and slots in host memory. A slot is a row of the host tier.

    Copies take effect on the device in call order. The host must call `await_copies` before it accesses a slot itself.
    """

    saving: CopySpeed
    loading: CopySpeed

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None: ...

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None: ...

    def await_copies(self, slots: Sequence[int]) -> None:
        """Wait until no copy from or to these slots is pending or in progress."""

    def flush(self) -> None:
        """Enqueue all pending copies on the device, in order."""

    def measure(self) -> None:
        """Record the durations of completed copies, without waiting."""

    def close(self) -> None:
        """Complete all copies and release the memory."""


class HostBlockCopier:
    """`BlockCopier` with synchronous copies, complete when a call returns. If `layout` is None, blocks have no
    bytes."""

    def __init__(self, layout: BlockLayout | None, rows: torch.Tensor) -> None:
        self._parts = []
        if layout is not None:
            slots = layout.slots(rows)
            self._parts = [(part.blocks.numpy(), slots[:, part.columns].numpy()) for part in layout.parts]
        self.saving = CopySpeed()
        self.loading = CopySpeed()

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        start_s = time.perf_counter()
        sources, targets = np.asarray(blocks, np.intp), np.asarray(slots, np.intp)
        for pool, host in self._parts:
            _copy(pool, sources, host, targets)
        self.saving.record_copy(len(blocks), time.perf_counter() - start_s)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        start_s = time.perf_counter()
        sources, targets = np.asarray(slots, np.intp), np.asarray(blocks, np.intp)
        for pool, host in self._parts:
            _copy(host, sources, pool, targets)
        self.loading.record_copy(len(blocks), time.perf_counter() - start_s)

    def await_copies(self, slots: Sequence[int]) -> None: ...

    def flush(self) -> None: ...

    def measure(self) -> None:
        """Do nothing: each copy was timed as it ran."""

    def close(self) -> None:
        self._parts.clear()


def _copy(source: WordRows, sources: Ids, target: WordRows, targets: Ids) -> None:
    """Copy all rows together through a temporary array, or one by one if there is no memory for that array."""
    try:
        target[targets] = source[sources]
    except MemoryError:
        for source_row, target_row in zip(sources, targets, strict=True):
            target[target_row] = source[source_row]
