"""The ledger's rows of what vLLM offloads to host memory: a row a block, those of a place one after another.

Owns what a row holds while it is written, since it can be found only once that is over. Belongs to the thread that
tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvscope_inside.vllm.block_texts import BlockText, hash_of_row, low_bits, text_of
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.state.cache_state import CacheState

MAX_TEXTS: Final = 500_000
"""Of blocks of all tiers, some 400 bytes each: of what is offloaded beyond that, tokens are not known."""
Find = Callable[[bytes, str], tuple[Any, int, int] | None]
"""Of a block's hash, and the id of the request that it is of or "": that request, its number, and which of its hashes
it is."""


@dataclass(slots=True)
class _Content:
    """Of a place, a value a row."""

    rows: range
    group: int
    number: int = 0
    hashes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)
    texts: list[BlockText | None] = field(default_factory=list)


class HostRows:
    """Behind those of the pool; `blocks_per_place` of them are given out at once. `texts`: by block, the pool's too."""

    def __init__(
        self,
        state: CacheState,
        texts: dict[int, BlockText],
        find: Find,
        *,
        hash_block_size: int,
        blocks_per_place: int,
    ) -> None:
        self._state, self._texts, self._find = state, texts, find
        self._first, self._sizes = state.hello.cache.num_blocks, state.hello.cache.block_sizes
        self._hash_block_size, self._per_place = hash_block_size, blocks_per_place
        self._places: dict[bytes, int] = {}
        """By the keys of what is in them, or will be."""
        self._written: dict[bytes, _Content] = {}
        """What will be in them."""

    def stores(self, step: int, keys: Sequence[bytes], places: Iterable[int], request_id: str) -> list[int]:
        """These are written from now on. Numbers of the requests whose text that is."""
        numbers = []
        for key, place in zip(keys, map(int, places), strict=True):
            content = self._content(key, self._rows_of(place), request_id)
            self._places[key], self._written[key] = place, content
            numbers.append(content.number)
            owner, group = content.number or NO_OWNER, content.group
            self._state.set_blocks(
                content.rows,
                state=BlockState.ACTIVE,
                ref_count=1,
                owner=owner,
                group=group,
                filled=0,
                hash=0,
                parent=0,
                prefix_hits=0,
                last_used_step=step,
            )
        return numbers

    def skips(self, places: Iterable[int], starts: Sequence[int]) -> None:
        """Of each group the first of these places is written from a block on, which is not its first."""
        by_row = {content.rows.start: content for content in self._written.values()}
        seen: set[int] = set()
        for place in map(int, places):
            content = by_row.get(self._rows_of(place).start)
            if content is not None and content.group not in seen and content.group < len(starts):
                seen.add(content.group)
                content.filled[: starts[content.group]] = [0] * starts[content.group]

    def stored(self, step: int, keys: Iterable[bytes], is_whole: bool) -> None:
        """They can be found now, or were not written after all."""
        for key in keys:
            content = self._written.pop(key, None)
            if content is None:
                continue
            if is_whole:
                self._fill(step, content)
            else:
                del self._places[key]
                self._state.free_blocks(content.rows)

    def evicted(self, keys: Iterable[bytes]) -> tuple[list[int], list[int]]:
        """Their places are given to others: rows that held something, and the hashes that were in them."""
        rows, hashes = [], []
        for key in keys:
            place = self._places.pop(key, None)
            if place is not None:
                rows += self._held(self._rows_of(place))
        hashes = self._state.ledger.hash[rows].tolist()
        self._free(rows)
        return rows, hashes

    def reads(self, step: int, places: Iterable[int]) -> None:
        """They are loaded into the pool, and held meanwhile."""
        for place in map(int, places):
            self._state.begin_read(self._held(self._rows_of(place)), step)

    def was_read(self, step: int, keys: Iterable[bytes]) -> None:
        """One that held them does so no more."""
        for key in keys:
            place = self._places.get(key)
            if place is not None:
                self._state.end_read(self._held(self._rows_of(place)), step)

    def emptied(self) -> int:
        """All are free. How many held something."""
        state = self._state.ledger.state
        rows = [self._first + int(row) for row in np.flatnonzero(state[self._first :] != BlockState.FREE)]
        self._places.clear()
        self._written.clear()
        self._free(rows)
        return len(rows)

    def _rows_of(self, place: int) -> range:
        start = self._first + place * self._per_place
        return range(start, start + self._per_place)

    def _held(self, rows: Iterable[int]) -> list[int]:
        return [row for row in rows if self._state.ledger.state[row] != BlockState.FREE]

    def _free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._texts.pop(row, None)
        self._state.free_blocks(rows)

    def _fill(self, step: int, content: _Content) -> None:
        state = self._state
        state.set_blocks(
            content.rows,
            state=BlockState.CACHED,
            ref_count=0,
            hash=np.array(content.hashes, np.uint64),
            parent=np.array(content.parents, np.uint64),
            filled=content.filled,
            last_used_step=step,
        )
        if len(self._texts) < MAX_TEXTS:
            self._texts.update({row: text for row, text in zip(content.rows, content.texts, strict=True) if text})
        empty = [row for row, filled in zip(content.rows, content.filled, strict=True) if not filled]
        self._free(empty)
        rows = [row for row in content.rows if row not in empty]
        state.add_moves("saved", rows)
        state.count(offloaded_blocks=len(rows))

    def _content(self, key: bytes, rows: range, request_id: str) -> _Content:
        """A key is the hash of the last block in the place, and the group."""
        group = int.from_bytes(key[-4:], "big")
        content, size = _Content(rows, group), self._sizes[group]
        found = self._find(key[:-4], request_id)
        if found is None:  # of a request that is not known here
            unknown = [0] * (len(rows) - 1)
            content.hashes, content.parents = [*unknown, hash_of_row(key)], [*unknown, 0]
            content.filled, content.texts = [size] * len(rows), [None] * len(rows)
            return content
        request, content.number, at = found
        end = (at + 1) * self._hash_block_size
        last = (end - 1) // size * size  # where its last block begins
        for start in range(last - (len(rows) - 1) * size, last + 1, size):
            before = start // self._hash_block_size - 1
            own = min(start + size, end) // self._hash_block_size - 1
            content.hashes.append(low_bits(request.block_hashes[own], group))
            content.parents.append(low_bits(request.block_hashes[before], group) if before >= 0 else 0)
            content.filled.append(min(size, end - start))
            content.texts.append(text_of(request, content.number, start, min(size, end - start)))
        return content
