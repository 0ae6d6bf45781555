"""Stores, by block hash, the tokens of cached blocks and their descriptions for display (`block_notes`), as KV events
reported them.

Memory is bounded; the oldest blocks are dropped first. One thread writes, any thread reads.
"""

from __future__ import annotations

import threading
from array import array
from typing import Final

from kvscope_telemetry.collectors.block_notes import Notes, notes_of
from kvscope_telemetry.kv_events.batches import HASH_MASK, BlockStored

MAX_BYTES: Final = 128 << 20
_TOKEN_BYTES: Final = 4
_ENTRY_BYTES: Final = 200
"""Estimated memory per block, in bytes, in addition to its tokens."""
_NOTES_BYTES: Final = 500
"""Estimated memory for the description of a block (`block_notes`), in bytes. Most blocks need less, because all
blocks of one event share a description.
"""
_MAX_TOKEN: Final = (1 << 32) - 1


class BlockTokens:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._tokens: dict[int, tuple[int, bytes]] = {}  # hash -> position of its first token in the text, tokens
        self._notes: dict[int, Notes] = {}  # hash -> notes, for blocks that have any
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, run: BlockStored) -> None:
        """Store the blocks of a KV event. An event without the tokens of all its blocks is ignored."""
        size = run.block_size
        if not run.token_ids or len(run.token_ids) != size * len(run.block_hashes):
            return
        try:
            packed = array("I", run.token_ids).tobytes()
        except (OverflowError, TypeError):
            return
        tokens, step = self._tokens, size * _TOKEN_BYTES
        notes = notes_of(run)
        with self._lock:
            start = self._end_of(run.parent_block_hash)
            for index, block_hash in enumerate(run.block_hashes):
                block_hash = block_hash or HASH_MASK
                if block_hash not in tokens:
                    tokens[block_hash] = (start + index * size, packed[index * step : index * step + step])
                    self._num_bytes += step + _ENTRY_BYTES
                    if notes[index]:
                        self._notes[block_hash] = notes[index]
                        self._num_bytes += _NOTES_BYTES
            while self._num_bytes > self._max_bytes:
                oldest = next(iter(tokens))
                self._num_bytes -= len(tokens.pop(oldest)[1]) + _ENTRY_BYTES
                if self._notes.pop(oldest, None):
                    self._num_bytes -= _NOTES_BYTES

    def get(self, block_hash: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the position of the block's first token in its text (0 if the beginning is unknown) and its
        tokens; None if the block is unknown.
        """
        with self._lock:
            stored = self._tokens.get(block_hash)
        return None if stored is None else (stored[0], tuple(array("I", stored[1])))

    def notes(self, block_hash: int) -> Notes:
        with self._lock:
            return self._notes.get(block_hash, ())

    def _end_of(self, parent: int | None) -> int:
        parent_tokens = None if parent is None else self._tokens.get(parent)
        return 0 if parent_tokens is None else parent_tokens[0] + len(parent_tokens[1]) // _TOKEN_BYTES
