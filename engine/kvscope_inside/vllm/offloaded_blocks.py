"""Publishes the blocks that vLLM offloads to host memory, as ledger rows below the pool.

A slot is vLLM's unit of offloading, a chunk of one or more blocks, which have consecutive rows. Owns the contents of
each slot, and the list of recently ended requests, whose last blocks vLLM may still offload. Used on the publishing
thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from kvscope_inside.cached_texts import CachedText
from kvscope_inside.host_request import HostRequest
from kvscope_inside.lower_tier_rows import LowerTierRows, StoredBlocks
from kvscope_inside.translator import Translator
from kvscope_inside.vllm.block_texts import hash_of_row, low_bits
from kvscope_telemetry.ledger import NO_OWNER
from kvscope_telemetry.messages.event_kinds import displaced_text

MAX_TEXTS: Final = 500_000
"""Maximum number of blocks, in all tiers, whose tokens are kept (some 400 bytes each).

Tokens of further offloaded blocks are unknown.
"""
_OFFLOADED_WITHIN: Final = 16
"""Steps after the end of a request within which vLLM may still offload its last blocks."""


@dataclass(slots=True)
class VllmRequest(HostRequest):
    """A request of vLLM."""

    num_loaded_tokens: int = 0
    """Tokens loaded, or being loaded, from outside the pool for its last start."""
    indices: dict[bytes, int] = field(default_factory=dict)
    """Indices of the block hashes that were searched so far."""

    def index_of(self, value: bytes) -> int | None:
        """Return the index of this block hash; None if it is not one of the request's."""
        hashes = self.host.block_hashes
        for index in range(len(self.indices), len(hashes)):
            self.indices.setdefault(hashes[index], index)
        return self.indices.get(value)


@dataclass(slots=True)
class _Copy:
    """A place that is being written: lists with one value per row, in order."""

    rows: range
    group: int
    number: int = 0
    hashes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)
    texts: list[CachedText | None] = field(default_factory=list)


class OffloadedBlocks:
    """Blocks in host memory. Its methods are handlers of `translator`.

    `blocks_per_slot`: number of blocks that are stored and evicted together.
    """

    def __init__(self, translator: Translator[VllmRequest], *, hash_block_size: int, blocks_per_slot: int) -> None:
        self._translator, self._state = translator, translator.state
        self._tier = LowerTierRows(translator.state)
        self._hash_block_size, self._per_slot = hash_block_size, blocks_per_slot
        self._slots: dict[bytes, int] = {}
        """Key -> place that holds, or will hold, its blocks."""
        self._copies: dict[bytes, _Copy] = {}
        self._ended: deque[tuple[int, VllmRequest]] = deque()
        """Ended requests, with the step in which they ended."""
        self._last_lookup: VllmRequest | None = None
        """The request whose block was offloaded last: blocks of a request usually follow each other."""

    @property
    def handlers(self) -> Mapping[str, Callable[..., None]]:
        """Handlers for the events of the offloading manager."""
        return {
            "stores": self._store,
            "stored": self._stored,
            "skips": self._skip,
            "reads": self._load,
            "was read": self._loaded,
            "emptied": self._emptied,
        }

    def end_step(self, ended: Iterable[VllmRequest]) -> None:
        """Keep requests that ended in the step, because vLLM may offload their blocks in the next few."""
        step = self._translator.step.number
        while self._ended and self._ended[0][0] + _OFFLOADED_WITHIN < step:
            self._ended.popleft()
            self._last_lookup = None
        self._ended += ((step, request) for request in ended)

    def _store(
        self, keys: Sequence[bytes], slots: Iterable[int], evicted: Sequence[bytes], request_id: str = ""
    ) -> None:
        """Publish that places are being written, after the blocks under the keys `evicted` were evicted."""
        translator = self._translator
        dropped = self._evict(evicted)
        owner = 0
        for key, slot in zip(keys, map(int, slots), strict=True):
            copy = self._copy_of(key, self._rows_of(slot), request_id)
            self._slots[key], self._copies[key] = slot, copy
            owner = owner or copy.number
            blocks = StoredBlocks(
                copy.rows, copy.hashes, copy.parents, copy.number or NO_OWNER, copy.filled, copy.group
            )
            self._tier.begin_store(key, blocks, translator.step.number)
        if dropped:
            self._state.add_moves("evicted", dropped)
            cause = displaced_text(len(dropped), owner)
            translator.events.report("evicted", other=owner, num_blocks=len(dropped), cause=cause)

    def _skip(self, slots: Iterable[int], starts: Sequence[int]) -> None:
        """For each group, mark the blocks before `starts` in the first of these places as not written."""
        by_row = {copy.rows.start: copy for copy in self._copies.values()}
        seen: set[int] = set()
        for slot in map(int, slots):
            copy = by_row.get(self._rows_of(slot).start)
            if copy is not None and copy.group not in seen and copy.group < len(starts):
                seen.add(copy.group)
                copy.filled[: starts[copy.group]] = [0] * starts[copy.group]

    def _stored(self, keys: Iterable[bytes], is_whole: bool) -> None:
        """Publish that places can be found, or (`is_whole` False) that writing them failed."""
        texts = self._translator.texts
        for key in keys:
            copy = self._copies.pop(key, None)
            if copy is None:
                continue
            if not is_whole:
                del self._slots[key]
                self._tier.cancel_store(key)
                continue
            self._tier.end_store(key, self._translator.step.number)
            if len(texts) < MAX_TEXTS:
                for row, text, filled in zip(copy.rows, copy.texts, copy.filled, strict=True):
                    if text is not None and filled:
                        texts.set(row, text)

    def _load(self, slots: Iterable[int]) -> None:
        for slot in map(int, slots):
            self._tier.begin_load(self._rows_of(slot), self._translator.step.number)

    def _loaded(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            slot = self._slots.get(key)
            if slot is not None:
                self._tier.end_load(self._rows_of(slot), self._translator.step.number)

    def _emptied(self) -> None:
        self._slots.clear()
        self._copies.clear()
        rows = self._tier.clear().tolist()
        for row in rows:
            self._translator.texts.discard(row)
        self._translator.events.report_emptied(len(rows), where="host memory")

    def _evict(self, keys: Iterable[bytes]) -> list[int]:
        """Free the rows of these keys. Returns those that held something."""
        slots = [slot for key in keys if (slot := self._slots.pop(key, None)) is not None]
        held, hashes = self._tier.evict([row for slot in slots for row in self._rows_of(slot)])
        rows: list[int] = held.tolist()
        for row in rows:
            self._translator.texts.discard(row)
        self._translator.evicted_hashes.record(filter(None, hashes), self._translator.step.number)
        return rows

    def _rows_of(self, slot: int) -> range:
        start = self._tier.first + slot * self._per_slot
        return range(start, start + self._per_slot)

    def _copy_of(self, key: bytes, rows: range, request_id: str) -> _Copy:
        """Return what a place will hold.

        A key is the hash of the place's last block, followed by the group (4 bytes).
        """
        group = int.from_bytes(key[-4:], "big")
        copy, size = _Copy(rows, group), self._translator.block_sizes[group]
        found = self._find(key[:-4], request_id)
        if found is None:  # of an unknown request
            unknown = [0] * (len(rows) - 1)
            copy.hashes, copy.parents = [*unknown, hash_of_row(key)], [*unknown, 0]
            copy.filled, copy.texts = [size] * len(rows), [None] * len(rows)
            return copy
        request, index = found
        hashes, copy.number = request.host.block_hashes, request.known.number
        end = (index + 1) * self._hash_block_size
        last = (end - 1) // size * size  # start of its last block
        for start in range(last - (len(rows) - 1) * size, last + 1, size):
            before = start // self._hash_block_size - 1
            own = min(start + size, end) // self._hash_block_size - 1
            copy.hashes.append(low_bits(hashes[own], group))
            copy.parents.append(low_bits(hashes[before], group) if before >= 0 else 0)
            copy.filled.append(min(size, end - start))
            copy.texts.append(self._translator.text_of(request, start, min(size, end - start)))
        return copy

    def _find(self, value: bytes, request_id: str) -> tuple[VllmRequest, int] | None:
        """Return the request that a block hash belongs to, and the hash's index; None if unknown.

        `request_id`: the likely request, or "".
        """
        requests = self._translator.requests
        likely = (requests.get(request_id), self._last_lookup)
        for request in chain(likely, requests.values(), (ended for _, ended in reversed(self._ended))):
            index = None if request is None else request.index_of(value)
            if request is not None and index is not None:
                self._last_lookup = request
                return request, index
        return None
