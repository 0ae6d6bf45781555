"""KV groups of an external engine, derived from its KV events: kind, window and block size of each.

A group is identified by the events' `group_idx` and the block size. Blocks of another size with the same index (such as
LMCache's chunks of 256 tokens with an engine's blocks of 16) form a separate group here, so that each ledger row has a
block size. Groups are numbered in order of appearance, permanently. Independent of ledger rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.collectors.row_allocator import tier_of
from kvscope_telemetry.kv_events.batches import BlockStored
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.telemetry import KVGroup
from kvscope_telemetry.messages.validity import MAX_BLOCK_SIZE, MAX_GROUPS

MAX_KIND_LETTERS: Final = 40
_KINDS: Final = {
    "full_attention": "full",
    "sink_full_attention": "full",
    "mla_attention": "latent",
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "chunked_local_attention": "chunked",
    "cross_attention": "cross",
    "mamba": "state",
}
"""Map from vLLM's kind of KV cache specification to `KVGroup.kind`."""


@dataclass(slots=True)
class _Group:
    index: int | None
    """`group_idx` of the group in events; None if events have no index."""
    size: int
    kind: str = ""
    window: int = 0
    is_on_device: bool = False


class Groups:
    """KV groups seen so far in the events of one engine. `number_of` must be called for each `BlockStored` event."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._numbers: dict[tuple[int | None, int], int] = {}

    def number_of(self, run: BlockStored) -> int:
        """Return the number of the KV group that the event's blocks belong to, adding the group if it is new.
        If there are already `MAX_GROUPS` groups, the blocks count as blocks of the last group.
        """
        key = (run.group_idx, run.block_size)
        number = self._numbers.get(key)
        if number is None and not run.block_size:
            number = next(self._numbers_of_index(run.group_idx), None)
        if number is None:
            number = self._new_number(run.group_idx, min(max(run.block_size, 1), MAX_BLOCK_SIZE))
            if number == MAX_GROUPS:
                return MAX_GROUPS - 1
            self._numbers[key] = number
        group = self._groups[number]
        if run.kv_cache_spec_kind and not group.kind:
            group.kind = _KINDS.get(run.kv_cache_spec_kind, run.kv_cache_spec_kind[:MAX_KIND_LETTERS])
            group.window = max(run.kv_cache_spec_sliding_window or 0, 0)
        if not group.is_on_device:
            group.is_on_device = tier_of(run.medium) is Tier.HBM
        return number

    def _numbers_of_index(self, index: int | None) -> Iterator[int]:
        """Yield the numbers of the groups that may have this index, for events without a block size."""
        for number, group in enumerate(self._groups):
            if index is None or group.index in (None, index):
                yield number

    def _new_number(self, index: int | None, size: int) -> int:
        """Return the number of the group with this index and block size, adding it if necessary. Returns `MAX_GROUPS`
        if there are too many.

        Events without a group index, such as those of an external KV store, belong to the first group with this block
        size.
        """
        for number, group in enumerate(self._groups):
            if group.size == size and None in (index, group.index):
                group.index = index if group.index is None else group.index
                return number
        if len(self._groups) < MAX_GROUPS:
            self._groups.append(_Group(index, size))
            return len(self._groups) - 1
        return MAX_GROUPS

    @property
    def sizes(self) -> npt.NDArray[np.uint16]:
        """Tokens per block, by group number; [1] if there is no group."""
        return np.array([group.size for group in self._groups] or [1], np.uint16)

    @property
    def block_size(self) -> int:
        """Tokens per block on the device; 0 before a block was reported. If there are several KV groups, this
        is the block size of full attention.
        """
        device_groups = [group for group in self._groups if group.is_on_device]
        first = next((group for group in device_groups if group.kind in ("full", "latent", "indexed")), None)
        return first.size if first else device_groups[0].size if device_groups else 0

    def published(self, block_size: int) -> tuple[KVGroup, ...]:
        """Return the value of `CacheInfo.groups`: empty for a single group with blocks of `block_size` tokens."""
        if [group.size for group in self._groups] in ([], [block_size]):
            return ()
        has_device = any(group.is_on_device for group in self._groups)
        return tuple(
            KVGroup(
                kind=group.kind or ("" if group.is_on_device or not has_device else "chunks"),
                block_size=group.size,
                window=group.window,
            )
            for group in self._groups
        )
