"""Finds the hashes of a prompt's blocks in the state of a `Follower`, without applying its pending frames.

A recording may have a new prompt in every frame, and to apply one frame at a time costs more than to read the few
columns that matter here from all pending frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.messages.telemetry import Frame, RequestRows
from kvscope_telemetry.mirror.coalesce import merge_request_rows
from kvscope_telemetry.mirror.follower import Follower

_U4 = np.dtype("<u4")


class PromptHashes:
    """State after the frames that were passed to `follower` until now. Valid until the next one is passed."""

    def __init__(self, follower: Follower) -> None:
        self._mirror = follower.mirror
        self._is_lost = follower.is_lost
        self._rows = _RequestTables(follower.pending)
        self._hashes = _BlockHashes(follower.pending)

    def of(self, number: int, num_prompt_tokens: int) -> tuple[int, ...]:
        """Return the hashes of the prompt's full blocks, 0 for a block without a hash.

        Empty if none has a hash, if a block of it was freed, or if the state is unknown.
        """
        hello = self._mirror.hello
        if self._is_lost or hello is None:
            return ()
        cache = hello.cache
        num_full = num_prompt_tokens // cache.block_size
        for group, size in enumerate(cache.block_sizes):
            table = self._rows.table(self._mirror.requests.table(number, group), number, group)[:num_full]
            if size == cache.block_size and (table >= cache.num_reserved_blocks).all():  # no block was freed
                hashes = self._hashes.of(self._mirror.ledger.hash, table)
                return tuple(hashes) if any(hashes) else ()
        return ()


class _RequestTables:
    def __init__(self, frames: Sequence[Frame]) -> None:
        rows = merge_request_rows([frame.requests for frame in frames]) if frames else RequestRows()
        self._numbers, self._starts, self._counts = (
            np.frombuffer(column, _U4) for column in (rows.number, rows.table_start, rows.table_count)
        )
        self._groups = np.frombuffer(rows.table_group, _U4) if rows.table_group else np.zeros_like(self._numbers)
        self._blocks = np.frombuffer(rows.table_blocks, _U4)
        self._ends = np.cumsum(self._counts, dtype=np.int64)

    def table(self, before: npt.NDArray[np.int32], number: int, group: int) -> npt.NDArray[np.int64]:
        """Return the block table of a request, which was `before` in the mirror."""
        table: list[int] = before.tolist()
        for row in np.flatnonzero((self._numbers == number) & (self._groups == group)).tolist():
            end = int(self._ends[row])
            del table[int(self._starts[row]) :]
            table += self._blocks[end - int(self._counts[row]) : end].tolist()
        return np.array(table, np.int64)


class _BlockHashes:
    def __init__(self, frames: Sequence[Frame]) -> None:
        ids = np.frombuffer(b"".join([frame.blocks.ids for frame in frames]), _U4)
        hashes = np.frombuffer(b"".join([frame.blocks.hash for frame in frames]), "<u8")
        order = np.argsort(ids, kind="stable")  # of several changes of a block, the last one stays last
        self._ids, self._hashes = ids[order], hashes[order]

    def of(self, before: npt.NDArray[np.uint64], blocks: npt.NDArray[np.int64]) -> list[int]:
        """Return the hashes of `blocks`, 0 for a block that the pool does not have. `before`: those in the mirror."""
        is_known = blocks < len(before)
        hashes = np.where(is_known, before[np.where(is_known, blocks, 0)], 0)
        if self._ids.size:
            last = np.maximum(np.searchsorted(self._ids, blocks, "right") - 1, 0)
            is_changed = self._ids[last] == blocks
            hashes[is_changed] = self._hashes[last[is_changed]]
        found: list[int] = hashes.tolist()
        return found
