"""Publishes the blocks that vLLM offloads to host memory, as ledger rows below the pool.

A slot is vLLM's unit of offloading: a chunk of one or more blocks, which have consecutive ledger rows. Owns the
contents of each slot, and the list of recently ended requests, because vLLM may still offload their last blocks. Used
on the publishing thread only.
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
"""Maximum number of blocks in all tiers for which tokens are stored. Each takes about 400 bytes.

Tokens of further offloaded blocks are unknown.
"""
_OFFLOADED_WITHIN: Final = 16
"""Number of steps for which a request is retained after its end, because vLLM may still offload its last blocks."""


@dataclass(slots=True)
class VllmRequest(HostRequest):
    num_loaded_tokens: int = 0
    """Number of tokens whose KV was or is being loaded from outside the pool when the request last started."""
    indices: dict[bytes, int] = field(default_factory=dict)
    """Map from a block hash to its index in the request's `block_hashes`, for the hashes that `index_of` has
    read so far.
    """

    def index_of(self, value: bytes) -> int | None:
        """Return the index of `value` in the request's block hashes; None if it is not one of them."""
        hashes = self.host.block_hashes
        for index in range(len(self.indices), len(hashes)):
            self.indices.setdefault(hashes[index], index)
        return self.indices.get(value)


@dataclass(slots=True)
class _Copy:
    """Contents of a slot that is being written. The lists have one value per ledger row, in order."""

    rows: range
    group: int
    number: int = 0
    hashes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)
    texts: list[CachedText | None] = field(default_factory=list)


class OffloadedBlocks:
    """Publishes the blocks in host memory from the events of vLLM's offloading manager.

    `blocks_per_slot`: number of blocks that are stored and evicted together.
    """

    def __init__(self, translator: Translator[VllmRequest], *, hash_block_size: int, blocks_per_slot: int) -> None:
        self._translator, self._state = translator, translator.state
        self._tier = LowerTierRows(translator.state)
        self._hash_block_size, self._per_slot = hash_block_size, blocks_per_slot
        self._slots: dict[bytes, int] = {}
        """Map from vLLM's offloading key to the slot that contains its blocks or is being written."""
        self._copies: dict[bytes, _Copy] = {}
        self._ended: deque[tuple[int, VllmRequest]] = deque()
        """Recently ended requests, each with the step in which it ended."""
        self._last_lookup: VllmRequest | None = None
        """Request whose block was offloaded last. It is searched first, because a request's blocks are usually
        offloaded together.
        """

    @property
    def handlers(self) -> Mapping[str, Callable[..., None]]:
        """Methods that handle the offloading manager's events, by event kind."""
        return {
            "stores": self._store,
            "stored": self._stored,
            "skips": self._skip,
            "reads": self._load,
            "was read": self._loaded,
            "emptied": self._emptied,
        }

    def end_step(self, ended: Iterable[VllmRequest]) -> None:
        """Retain requests that ended in the step, because vLLM may offload their blocks in the next steps."""
        step = self._translator.step.number
        while self._ended and self._ended[0][0] + _OFFLOADED_WITHIN < step:
            self._ended.popleft()
            self._last_lookup = None
        self._ended += ((step, request) for request in ended)

    def _store(
        self, keys: Sequence[bytes], slots: Iterable[int], evicted: Sequence[bytes], request_id: str = ""
    ) -> None:
        """Publish that slots are being written with the blocks of `keys`, after the blocks under the keys
        `evicted` were evicted.
        """
        translator = self._translator
        dropped = self._evict(evicted)
        owner = 0
        for key, slot in zip(keys, map(int, slots), strict=True):
            copy = self._slot_contents(key, self._rows_of(slot), request_id)
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
        """For each KV group, mark the blocks before index `starts[group]` in its first slot as not written."""
        by_row = {copy.rows.start: copy for copy in self._copies.values()}
        seen: set[int] = set()
        for slot in map(int, slots):
            copy = by_row.get(self._rows_of(slot).start)
            if copy is not None and copy.group not in seen and copy.group < len(starts):
                seen.add(copy.group)
                copy.filled[: starts[copy.group]] = [0] * starts[copy.group]

    def _stored(self, keys: Iterable[bytes], is_whole: bool) -> None:
        """Publish that prompts can hit the slots of `keys` or, if `is_whole` is False, that writing these slots
        failed.
        """
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
        """Free the ledger rows of these keys. Returns the rows that were not free."""
        slots = [slot for key in keys if (slot := self._slots.pop(key, None)) is not None]
        non_free, hashes = self._tier.evict([row for slot in slots for row in self._rows_of(slot)])
        rows: list[int] = non_free.tolist()
        for row in rows:
            self._translator.texts.discard(row)
        self._translator.evicted_hashes.record(filter(None, hashes), self._translator.step.number)
        return rows

    def _rows_of(self, slot: int) -> range:
        start = self._tier.first + slot * self._per_slot
        return range(start, start + self._per_slot)

    def _slot_contents(self, key: bytes, rows: range, request_id: str) -> _Copy:
        """Return the contents of a slot that is being written to ledger rows `rows`.

        `key`: the hash of the slot's last block, followed by the KV group (4 bytes).
        """
        group = int.from_bytes(key[-4:], "big")
        copy, size = _Copy(rows, group), self._translator.block_sizes[group]
        owner_and_index = self._find(key[:-4], request_id)
        if owner_and_index is None:  # of an unknown request
            unknown = [0] * (len(rows) - 1)
            copy.hashes, copy.parents = [*unknown, hash_of_row(key)], [*unknown, 0]
            copy.filled, copy.texts = [size] * len(rows), [None] * len(rows)
            return copy
        request, index = owner_and_index
        hashes, copy.number = request.host.block_hashes, request.known.number
        end = (index + 1) * self._hash_block_size
        last_start = (end - 1) // size * size  # start of its last block
        for start in range(last_start - (len(rows) - 1) * size, last_start + 1, size):
            parent_index = start // self._hash_block_size - 1
            hash_index = min(start + size, end) // self._hash_block_size - 1
            copy.hashes.append(low_bits(hashes[hash_index], group))
            copy.parents.append(low_bits(hashes[parent_index], group) if parent_index >= 0 else 0)
            copy.filled.append(min(size, end - start))
            copy.texts.append(self._translator.text_of(request, start, min(size, end - start)))
        return copy

    def _find(self, value: bytes, request_id: str) -> tuple[VllmRequest, int] | None:
        """Return the request that the block hash `value` belongs to, and the index of the hash in it; None if unknown.

        `request_id`: the request to search first, or "".
        """
        requests = self._translator.requests
        likely_requests = (requests.get(request_id), self._last_lookup)
        for request in chain(likely_requests, requests.values(), (ended for _, ended in reversed(self._ended))):
            index = None if request is None else request.index_of(value)
            if request is not None and index is not None:
                self._last_lookup = request
                return request, index
        return None
