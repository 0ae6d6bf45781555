"""Tracks the prefixes in a persistent file of the disk tier: those of the last run, and those to list in the index at
exit.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from kvscope_engine.model.kv_cache.kv_offload.disk_index import (
    DiskIndex,
    IndexedBlock,
    IndexRequirements,
    read_index,
    write_index,
)
from kvscope_engine.model.kv_cache.kv_offload.disk_open import OpenFile, index_path
from kvscope_engine.policy.prefixes.prefix_index import SALT_BYTES, Prefix
from kvscope_telemetry.errors import BadInput


class PersistentPrefixes:
    """Prefixes in a persistent disk tier file by slot, from the last run's index and from offloads. Does not verify
    checksums.

    Raises BadInput if no index can be written next to the file.
    """

    def __init__(self, file: OpenFile, path: Path, requirements: IndexRequirements) -> None:
        self._file = file
        self._index_path = index_path(path)
        self._requirements = requirements
        index, reason = read_index(self._index_path, requirements, file.previous_bytes)
        self.note = f"{str(path)!r} is used anew: its index {reason}" if reason else ""
        self.salt = index.salt if index is not None else secrets.token_bytes(SALT_BYTES)
        self.recovered = index.blocks if index is not None else []
        self._prefixes: dict[int, Prefix] = {block.slot: block.prefix for block in self.recovered}
        try:
            write_index(self._index_path, self._index([]))
        except OSError as error:
            raise BadInput(f"cannot write {str(self._index_path)!r}: {error.strerror}") from error

    def record_offload(self, slot: int, prefix: Prefix | None) -> None:
        """Record that `prefix` is about to be written to `slot`; None for data that no prefix identifies."""
        self._prefixes.pop(slot, None)
        if prefix is not None:
            self._prefixes[slot] = prefix

    def clear(self) -> None:
        """Exclude the current contents of the file from the index for the next start."""
        self._prefixes.clear()

    def finish(self, checksums: dict[int, int]) -> None:
        """Sync the file and write the index for the next start. Raises OSError."""
        if not self._file.is_at_path():
            raise FileNotFoundError("removed or replaced")
        os.fsync(self._file.fd)
        write_index(self._index_path, self._index(self._blocks_to_list(checksums)))

    def _blocks_to_list(self, checksums: dict[int, int]) -> list[IndexedBlock]:
        """Return the index entries of valid slots. If several slots have the same digest, only the last is listed."""
        last = {prefix.digest: slot for slot, prefix in self._prefixes.items() if slot in checksums}
        listed = [(slot, self._prefixes[slot]) for slot in last.values()]
        return [
            IndexedBlock(
                slot,
                checksums[slot],
                prefix.digest,
                prefix.start,
                prefix.tokens,
                prefix.parent,
                prefix.salt,
                adapter=prefix.adapter,
                adapter_key=prefix.adapter_key,
            )
            for slot, prefix in listed
        ]

    def _index(self, blocks: Sequence[IndexedBlock]) -> DiskIndex:
        size = os.fstat(self._file.fd).st_size
        return DiskIndex(self._requirements.fingerprint, self.salt, size, list(blocks))
