"""Tracks the prefixes in a disk tier file that persists: those found at the start, and those to list at exit."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from kvscope_engine.model.kv_cache.kv_offload.disk_open import OpenFile, index_path
from kvscope_engine.model.kv_cache.kv_offload.kept_index import Expected, KeptBlock, KeptIndex, read_index, write_index
from kvscope_engine.policy.prefixes.prefix_index import SALT_BYTES, Prefix
from kvscope_telemetry.errors import BadInput


class KeptFile:
    """Prefixes by slot, from the last run's index and from offloads. Checksums are verified elsewhere.

    Raises BadInput if no index can be written next to the file.
    """

    def __init__(self, file: OpenFile, path: Path, expected: Expected) -> None:
        self._file = file
        self._index_path = index_path(path)
        self._expected = expected
        index, reason = read_index(self._index_path, expected, file.found_bytes)
        self.note = f"{str(path)!r} is used anew: its index {reason}" if reason else ""
        self.salt = index.salt if index is not None else secrets.token_bytes(SALT_BYTES)
        self.found = index.blocks if index is not None else []
        self._prefixes: dict[int, Prefix] = {block.place: block.prefix for block in self.found}
        try:
            write_index(self._index_path, self._index([]))
        except OSError as error:
            raise BadInput(f"cannot write {str(self._index_path)!r}: {error.strerror}") from error

    def offloaded(self, place: int, prefix: Prefix | None) -> None:
        """Record that `place` is about to hold `prefix`, or nothing that can be found again."""
        self._prefixes.pop(place, None)
        if prefix is not None:
            self._prefixes[place] = prefix

    def forget(self) -> None:
        """Exclude the current contents from the index that the next start reads."""
        self._prefixes.clear()

    def finish(self, checksums: dict[int, int]) -> None:
        """Sync the file and write the index for the next start. Raises OSError."""
        if not self._file.is_in_place():
            raise FileNotFoundError("removed or replaced")
        os.fsync(self._file.fd)
        write_index(self._index_path, self._index(self._kept(checksums)))

    def _kept(self, checksums: dict[int, int]) -> list[KeptBlock]:
        """Return the blocks to list; if several slots have the same digest, only the last."""
        last = {prefix.digest: place for place, prefix in self._prefixes.items() if place in checksums}
        kept = [(place, self._prefixes[place]) for place in last.values()]
        return [
            KeptBlock(
                place,
                checksums[place],
                prefix.digest,
                prefix.start,
                prefix.tokens,
                prefix.parent,
                prefix.salt,
                adapter=prefix.adapter,
                adapter_key=prefix.adapter_key,
            )
            for place, prefix in kept
        ]

    def _index(self, blocks: Sequence[KeptBlock]) -> KeptIndex:
        size = os.fstat(self._file.fd).st_size
        return KeptIndex(self._expected.fingerprint, self.salt, size, list(blocks))
